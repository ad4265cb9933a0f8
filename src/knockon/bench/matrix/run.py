"""The whole matrix: batch after batch, what is finished passed over, what fails put down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from knockon.bench.matrix.batch import run_batch
from knockon.bench.matrix.cells import WHOLE, Cell, Share
from knockon.bench.matrix.estimate import Estimate, duration
from knockon.bench.matrix.folder import DONE, FAILED, ResultsFolder
from knockon.bench.matrix.progress import Progress
from knockon.bench.matrix.settings import MatrixSettings


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
    share: Share = WHOLE,
) -> dict[Cell, str]:
    """Measure what is not finished.

    Args:
        share: the part of the matrix that ``cells`` are; the whole, where it is left out.

    Returns:
        The cells that have failed, now or before, and why.
    """
    told = progress or Progress()
    estimate = Estimate()
    with folder.open(settings, cells, share):
        left = to_measure(cells, folder, retry_failed)
        for cell in cells:
            if folder.status(cell) == DONE:
                record = folder.record(cell)
                # Cells that had more or fewer servers ahead of them took another time.
                if record.get("servers_ahead", 0) == settings.servers_ahead:
                    estimate.add(cell, record["seconds"])
        ended = len(cells) - len(left)
        part = f" of share {share}" if share.count > 1 else ""

        def measured(cell: Cell, record: dict[str, Any], more: str = "") -> None:
            nonlocal ended
            ended += 1
            told.done(f"[{ended}/{len(cells)}{part}] {line(cell, record)}{more}")

        while left:
            batch, left = left[: settings.servers_ahead + 1], left[settings.servers_ahead + 1 :]
            told.cell(batch[0], settings.requests_of(batch[0].workload, batch[0].concurrency))
            records = run_batch(settings, batch, folder, share, told, measured)
            for cell, record in records.items():
                estimate.add(cell, record["seconds"])
            measured(batch[-1], records[batch[-1]], outlook(estimate, left))
        found = {cell: folder.record(cell) for cell in cells if folder.status(cell) == FAILED}
    return {cell: str(record["error"]) for cell, record in found.items()}


def outlook(estimate: Estimate, left: Sequence[Cell]) -> str:
    """How long what is left will take, and at what rate."""
    seconds = estimate.of(left)
    if not seconds:
        return ""
    rate = 60 * len(left) / seconds
    return f"; about {duration(seconds)} left, at {rate:.1f} cells a minute"


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
