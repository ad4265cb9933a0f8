"""Cells: what is measured with a server of its own, in the order of measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from knockon.bench.matrix.methods import ServedMethod
from knockon.bench.matrix.workloads import ServedWorkload


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
