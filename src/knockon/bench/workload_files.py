"""Files of prompts as workloads: which there are, what they are called, how tables order them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from knockon.errors import Refused

# How the published tables write and order them.
TITLES = {
    "gsm8k": "GSM8K",
    "math500": "MATH500",
    "humaneval": "HumanEval",
    "mbpp": "MBPP",
    "mt-bench": "MT-Bench",
    "alpaca": "Alpaca",
}


def title_of(name: str) -> str:
    """How the published tables write a workload."""
    return TITLES.get(name, name)


def order_of(name: str) -> tuple[int, str]:
    """Where a workload stands in tables: the published ones first, others after them."""
    return (list(TITLES).index(name) if name in TITLES else len(TITLES), name)


def workload_files(paths: Sequence[Path], wanted: str) -> list[Path]:
    """The files themselves, and the ``*.jsonl`` files of folders.

    Args:
        wanted: what a path should be, for the refusal of one that is no file.

    Raises:
        Refused: a folder without such files, or a path that is neither.
    """
    return [file for path in paths for file in _files(path, wanted)]


def _files(path: Path, wanted: str) -> list[Path]:
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        if not files:
            raise Refused("workloads", str(path), "a folder with *.jsonl files")
        return files
    if not path.is_file():
        raise Refused("workloads", str(path), wanted)
    return [path]


def refuse_repeated(names: Sequence[str]) -> None:
    """Refuse a workload that is there twice."""
    for name in names:
        if names.count(name) > 1:
            raise Refused("workloads", name, "each workload once")
