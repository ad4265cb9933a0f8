"""The numbers of a matrix: means over repeats, speed-ups, macro speed-ups, equal answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knockon.bench.matrix.cells import Cell
from knockon.bench.matrix.folder import DONE, ResultsFolder
from knockon.bench.matrix.methods import AUTO, TARGET, ServedMethod, parse_method
from knockon.bench.workload_files import order_of


@dataclass(frozen=True)
class Sample:
    """A number over the repeats that were measured, in order."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over repeats."""
        return sum(self.values) / len(self.values)

    @property
    def half_range(self) -> float | None:
        """Half of what lies between the least and the greatest; ``None`` of one repeat."""
        values = self.values
        return (max(values) - min(values)) / 2 if len(values) > 1 else None


@dataclass(frozen=True)
class Macro:
    """A mean of speed-ups, each workload (and concurrency) counting alike.

    Attributes:
        of: how many there should be; ``count`` have been measured.
    """

    mean: float
    count: int
    of: int

    @property
    def complete(self) -> bool:
        """Whether it may be compared with another's."""
        return self.count == self.of


class Results:
    """A results folder, read once.

    Attributes:
        settings: as saved.
        methods, workloads, concurrencies, repeats: what was asked for, in the order of tables.
        done: records by cell. failed: likewise.
    """

    def __init__(self, folder: ResultsFolder) -> None:
        self.settings = folder.settings()
        self.methods = [parse_method(name) for name in self.settings["methods"]]
        self.workloads: list[str] = sorted(self.settings["workloads"], key=order_of)
        self.concurrencies: list[int] = sorted(self.settings["concurrencies"])
        self.repeats: int = self.settings["repeats"]
        self.done: dict[Cell, dict[str, Any]] = {}
        self.failed: dict[Cell, dict[str, Any]] = {}
        for record in folder.records():
            kept = self.done if record["status"] == DONE else self.failed
            kept[Cell(**record["cell"])] = record

    @property
    def model(self) -> str:
        """The target's name; of a path, its last part."""
        name: str = self.settings["model"]
        return Path(name).name if name.startswith(("/", ".", "~")) else name

    @property
    def drafted(self) -> list[ServedMethod]:
        """The methods that speculate."""
        return [method for method in self.methods if method.kind != TARGET]

    def cells(self, method: str, workload: str, concurrency: int) -> list[Cell]:
        """The cells of a table's entry, over repeats."""
        return [Cell(r, workload, concurrency, method) for r in range(1, self.repeats + 1)]

    def records(self, method: str, workload: str, concurrency: int) -> list[dict[str, Any]]:
        """What was measured of an entry."""
        cells = self.cells(method, workload, concurrency)
        return [self.done[cell] for cell in cells if cell in self.done]

    def missing(self) -> list[Cell]:
        """Cells that were asked for and never measured."""
        return [
            cell
            for method in self.methods
            for workload in self.workloads
            for concurrency in self.concurrencies
            for cell in self.cells(method.name, workload, concurrency)
            if cell not in self.done and cell not in self.failed
        ]

    def sample(self, method: str, workload: str, concurrency: int, name: str) -> Sample | None:
        """A field of the summary, ``"ttft.mean"`` say; ``None`` where nothing tells it."""
        values = []
        for record in self.records(method, workload, concurrency):
            value: Any = record["summary"]
            for part in name.split("."):
                value = value[part]
            if value is not None:
                values.append(float(value))
        return Sample(tuple(values)) if values else None

    def throughput(self, method: str, workload: str, concurrency: int) -> Sample | None:
        """Output tokens a second."""
        return self.sample(method, workload, concurrency, "output_throughput")

    def accept_length(self, method: str, workload: str, concurrency: int) -> Sample | None:
        """Tokens a verification, the bonus included."""
        return self.sample(method, workload, concurrency, "accept_length")

    def speed_up(self, method: str, workload: str, concurrency: int) -> float | None:
        """Mean output tokens a second over those of the target alone."""
        ours = self.throughput(method, workload, concurrency)
        alone = self.throughput(TARGET, workload, concurrency)
        return ours.mean / alone.mean if ours is not None and alone is not None else None

    def macro(self, method: str, concurrencies: Sequence[int]) -> Macro | None:
        """The arithmetic mean of the speed-ups of all workloads at these concurrencies."""
        ratios = [self.speed_up(method, w, c) for c in concurrencies for w in self.workloads]
        known = [ratio for ratio in ratios if ratio is not None]
        return Macro(sum(known) / len(known), len(known), len(ratios)) if known else None

    def most(self, method: ServedMethod) -> int | None:
        """The greatest accept length that a method can have; ``None`` where widths change."""
        if isinstance(method.width, int):
            return method.width
        widths = {
            record["server"]["metrics"]["verify_width"]
            for cell, record in self.done.items()
            if cell.method == method.name and (record["server"] or {}).get("metrics")
        }
        width = widths.pop() if len(widths) == 1 else AUTO
        return width if isinstance(width, int) else None

    def equal_answers(self, method: str, workload: str, concurrency: int) -> tuple[int, int] | None:
        """Answers that equal the target's own, and how many were compared.

        Each repeat is held to the target's of the same repeat; the target's later repeats to its
        first, which tells what batching alone changes.
        """
        same = compared = 0
        for cell in self.cells(method, workload, concurrency):
            repeat = 1 if method == TARGET else cell.repeat
            other = Cell(repeat, workload, concurrency, TARGET)
            if cell == other or cell not in self.done or other not in self.done:
                continue
            pairs = zip(_answers(self.done[cell]), _answers(self.done[other]), strict=True)
            found = [ours == theirs for ours, theirs in pairs]
            same, compared = same + sum(found), compared + len(found)
        return (same, compared) if compared else None


def _answers(record: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each["name"], each["text_sha256"]) for each in record["requests"]]
