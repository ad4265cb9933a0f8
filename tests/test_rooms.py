"""A room imports only from the rooms below it: the table of the architecture page, held here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import knockon

PACKAGE = Path(knockon.__file__).parent

_LOWER = {"parallel", "rollout", "layers", "models", "drafters"}
_ANY = _LOWER | {"engine", "train", "server", "bench", "integrations", "cli"}
MAY_IMPORT: dict[str, set[str]] = {
    "parallel": set(),
    "rollout": {"parallel"},
    "layers": {"parallel"},
    "models": {"parallel", "layers"},
    "drafters": {"parallel", "rollout", "layers", "models"},
    "engine": _LOWER,
    "train": _LOWER | {"engine"},
    "server": {"engine"},
    "bench": _LOWER | {"engine", "train", "server"},
    "integrations": {"parallel", "rollout", "drafters"},
    "cli": _ANY,
}
# The rooms that other engines can take over whole: no third-party package but these.
OUTSIDE: dict[str, set[str]] = {
    "parallel": {"torch"},
    "rollout": {"torch", "triton"},
    "layers": {"torch", "triton", "fla"},  # fla where it is installed and asked for
}
THIRD_PARTY = {
    *("torch", "triton", "transformers", "safetensors", "gguf", "huggingface_hub", "numpy"),
    *("fastapi", "uvicorn", "zmq", "msgspec", "prometheus_client", "typer", "rich"),
    *("aiohttp", "matplotlib", "scipy", "vllm", "flashinfer", "fla"),
}


def imported_modules(path: Path) -> set[str]:
    """Every module that a file imports anywhere in it, with relative imports made absolute."""
    package = ("knockon", *path.relative_to(PACKAGE).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            # `from knockon import engine` names a room too; `from knockon import LLM` does not.
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def rooms_imported(path: Path) -> set[str]:
    parts = [module.split(".") for module in imported_modules(path)]
    return {name[1] for name in parts if name[0] == "knockon" and len(name) > 1} & set(MAY_IMPORT)


def room_files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE)


@pytest.mark.parametrize("path", room_files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_imports_only_what_the_table_allows(path):
    room = path.relative_to(PACKAGE).parts[0]
    assert room in MAY_IMPORT, f"{room}/ is not a room of the architecture page"
    assert rooms_imported(path) - {room} <= MAY_IMPORT[room]


@pytest.mark.parametrize("room", sorted(OUTSIDE))
def test_the_lowest_rooms_need_nothing_but_torch_and_triton(room):
    for path in (PACKAGE / room).rglob("*.py"):
        tops = {module.split(".")[0] for module in imported_modules(path)}
        assert tops & THIRD_PARTY <= OUTSIDE[room], path


@pytest.mark.parametrize("name", ["errors.py", "startup_heap.py", "triton_backend.py"])
def test_the_modules_under_all_rooms_import_nothing_of_the_package(name):
    assert not rooms_imported(PACKAGE / name)


def test_every_form_of_import_is_seen(monkeypatch, tmp_path):
    file = tmp_path / "rollout" / "some.py"
    file.parent.mkdir()
    file.write_text(
        "import knockon.engine.llm\n"
        "from knockon import server\n"
        "from ..train import loop\n"
        "from . import head\n"
        "def late():\n    from knockon.models.catalog import resolve\n"
    )
    monkeypatch.setattr("tests.test_rooms.PACKAGE", tmp_path)
    assert rooms_imported(file) == {"engine", "server", "train", "rollout", "models"}
