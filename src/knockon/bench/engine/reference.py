"""Another engine's published numbers, to stand beside one's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knockon.bench.engine.settings import METHODS, EngineSettings
from knockon.errors import Refused
from knockon.models.json_file import read_json_object

_ALIKE = ("model", "dtype", "input_len", "output_len")


@dataclass(frozen=True)
class Reference:
    """Output tokens per second of another engine.

    Attributes:
        name: e.g. ``"vLLM 0.25.1"``.
        measured: where, when and how.
        conditions: ``model``, ``dtype``, ``input_len`` and ``output_len`` as they were there.
        tokens_per_second: by method and concurrency.
        step_ms: likewise, where known.
    """

    name: str
    measured: str
    conditions: dict[str, Any]
    tokens_per_second: dict[tuple[str, int], float]
    step_ms: dict[tuple[str, int], float]

    def differences(self, settings: EngineSettings) -> str:
        """What was otherwise there than in this run; empty where nothing was."""
        here = {
            "model": settings.shape.name,
            "dtype": settings.dtype,
            "input_len": settings.input_len,
            "output_len": settings.output_len,
        }
        return ", ".join(
            f"{name} {self.conditions[name]}, here {here[name]}"
            for name in _ALIKE
            if self.conditions[name] != here[name]
        )


def read_reference(path: Path) -> Reference:
    """Read such a file; ``benchmarks/references`` has some.

    Raises:
        Refused: no such file, or one that lacks a field.
    """
    if not path.is_file():
        raise Refused("reference", str(path), "a JSON file, as benchmarks/references has them")
    data = read_json_object(path)
    for name in ("name", "measured", *_ALIKE, "results"):
        if name not in data:
            raise Refused(f"reference {path.name}: {name}", None, "a value")
    speeds: dict[tuple[str, int], float] = {}
    step_ms: dict[tuple[str, int], float] = {}
    rows = data["results"]
    wanted = f"objects with method ({', '.join(METHODS)}) and concurrency"
    for row in rows if isinstance(rows, list) else [rows]:
        if not isinstance(row, dict) or row.get("method") not in METHODS:
            raise Refused(f"reference {path.name}: results", row, wanted)
        if not isinstance(row.get("concurrency"), int):
            raise Refused(f"reference {path.name}: results", row, wanted)
        key = (row["method"], row["concurrency"])
        speeds[key] = _positive(path, row, "tokens_per_second")
        if "step_ms" in row:
            step_ms[key] = _positive(path, row, "step_ms")
    conditions = {name: data[name] for name in _ALIKE}
    return Reference(str(data["name"]), str(data["measured"]), conditions, speeds, step_ms)


def _positive(path: Path, row: dict[str, Any], name: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise Refused(f"reference {path.name}: {name}", value, "a number above 0")
    return float(value)
