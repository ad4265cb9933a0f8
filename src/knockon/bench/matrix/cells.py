"""Cells: what is measured with a server of its own, in the order of measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from knockon.bench.matrix.methods import ServedMethod
from knockon.bench.matrix.workloads import ServedWorkload
from knockon.errors import Refused


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        repeat: from 1.
        workload, method: by name.
        concurrency: requests in flight at most.
    """

    repeat: int
    workload: str
    concurrency: int
    method: str

    @property
    def group(self) -> str:
        """What its methods are compared within."""
        return f"{self.workload}-c{self.concurrency}"

    @property
    def name(self) -> str:
        """As its file is called."""
        return f"r{self.repeat}-{self.workload}-c{self.concurrency}-{self.method}"


def plan(
    methods: Sequence[ServedMethod],
    workloads: Sequence[ServedWorkload],
    concurrencies: Sequence[int],
    repeats: int,
) -> list[Cell]:
    """All cells, in order.

    Repeats are outermost, so that a matrix that ends early holds whole ones; methods are innermost,
    so that what is compared is measured in one stretch of time.
    """
    return [
        Cell(repeat, workload.name, concurrency, method.name)
        for repeat in range(1, repeats + 1)
        for workload in workloads
        for concurrency in concurrencies
        for method in methods
    ]


@dataclass(frozen=True)
class Share:
    """One of ``count`` parts of a matrix, for as many GPUs; ``index`` from 1.

    Raises:
        Refused: no such part.
    """

    index: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count:
            raise Refused("share", str(self), "I/N, with I from 1 to N")

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def of(self, cells: Sequence[Cell]) -> list[Cell]:
        """Its cells, in order.

        All cells of one workload and concurrency, over methods and repeats, are of one share: what
        is compared is measured on one GPU. Each share gets its part of every concurrency.
        """
        workloads = list(dict.fromkeys(cell.workload for cell in cells))
        concurrencies = list(dict.fromkeys(cell.concurrency for cell in cells))

        def part(cell: Cell) -> int:
            place = workloads.index(cell.workload) + concurrencies.index(cell.concurrency)
            return place % self.count + 1

        return [cell for cell in cells if part(cell) == self.index]


WHOLE = Share()


def parse_share(text: str) -> Share:
    """Read ``"1/2"``.

    Raises:
        Refused: anything else.
    """
    index, _, count = text.partition("/")
    try:
        return Share(int(index), int(count))
    except ValueError as error:
        if isinstance(error, Refused):
            raise
        raise Refused("share", text, "I/N, with I from 1 to N") from None
