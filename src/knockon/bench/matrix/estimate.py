"""How long what is left will take, by what alike cells took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from knockon.bench.matrix.cells import Cell

# From cells that are the same but for the repeat, to any at all.
_LIKE: tuple[Callable[[Cell], object], ...] = (
    lambda cell: (cell.method, cell.workload, cell.concurrency),
    lambda cell: (cell.method, cell.concurrency),
    lambda cell: cell.concurrency,
    lambda cell: None,
)


class Estimate:
    """Keeps the seconds of finished cells."""

    def __init__(self) -> None:
        self._known: dict[object, list[float]] = defaultdict(list)

    def add(self, cell: Cell, seconds: float) -> None:
        """A cell took so long."""
        for level, like in enumerate(_LIKE):
            self._known[level, like(cell)].append(seconds)

    def of(self, cells: Iterable[Cell]) -> float | None:
        """Seconds that cells will take; ``None`` while nothing is known."""
        total = 0.0
        for cell in cells:
            for level, like in enumerate(_LIKE):
                known = self._known.get((level, like(cell)))
                if known:
                    total += sum(known) / len(known)
                    break
            else:
                return None
        return total


def duration(seconds: float) -> str:
    """``"1 h 05 min"``, ``"12 min 30 s"``, ``"45 s"``."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{whole} s"
