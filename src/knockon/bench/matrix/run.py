"""The whole matrix: cell after cell, what is finished passed over, what fails put down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from knockon.bench.matrix.cells import Cell
from knockon.bench.matrix.estimate import Estimate, duration
from knockon.bench.matrix.folder import DONE, FAILED, ResultsFolder
from knockon.bench.matrix.measure import measure_cell
from knockon.bench.matrix.settings import MatrixSettings


@dataclass(frozen=True)
class Progress:
    """Who is told what; each may be left out.

    Attributes:
        cell: a cell is begun, of so many requests.
        doing: what is under way in it.
        ended: a request has ended.
        done: a line on a finished cell.
    """

    cell: Callable[[Cell, int], None] = lambda cell, requests: None
    doing: Callable[[str], None] = lambda text: None
    ended: Callable[[], None] = lambda: None
    done: Callable[[str], None] = lambda text: None


def to_measure(cells: Sequence[Cell], folder: ResultsFolder, retry_failed: bool) -> list[Cell]:
    """The cells that are still to be measured, in order."""
    over = {DONE} if retry_failed else {DONE, FAILED}
    return [cell for cell in cells if folder.status(cell) not in over]


def run_matrix(
    settings: MatrixSettings,
    cells: Sequence[Cell],
    folder: ResultsFolder,
    retry_failed: bool = False,
    progress: Progress | None = None,
) -> dict[Cell, str]:
    """Measure what is not finished.

    Returns:
        The cells that have failed, now or before, and why.
    """
    told = progress or Progress()
    estimate = Estimate()
    with folder.open(settings):
        left = to_measure(cells, folder, retry_failed)
        for cell in cells:
            if folder.status(cell) == DONE:
                estimate.add(cell, folder.record(cell)["seconds"])
        workloads = {workload.name: workload for workload in settings.workloads}
        while left:
            cell = left.pop(0)
            requests = settings.prompts_of(workloads[cell.workload], cell.concurrency)
            told.cell(cell, requests)
            record = measure_cell(settings, cell, folder, told.doing, told.ended)
            folder.write(cell, record)
            estimate.add(cell, record["seconds"])
            seconds = estimate.of(left)
            told.done(
                f"[{len(cells) - len(left)}/{len(cells)}] {line(cell, record)}"
                + (f"; about {duration(seconds)} left" if left and seconds is not None else "")
            )
        found = {cell: folder.record(cell) for cell in cells if folder.status(cell) == FAILED}
    return {cell: str(record["error"]) for cell, record in found.items()}


def line(cell: Cell, record: dict[str, Any]) -> str:
    """A finished cell on one line."""
    if record["status"] == FAILED:
        return f"{cell.name}: FAILED: {record['error']}"
    found = record["summary"]
    accept = found["accept_length"]
    told = "" if accept is None else f", accept length {accept:.3f}"
    return (
        f"{cell.name}: {found['output_throughput']:.1f} tok/s{told}, "
        f"ready after {record['start']['ready']:.1f} s, {record['seconds']:.1f} s in all"
    )
