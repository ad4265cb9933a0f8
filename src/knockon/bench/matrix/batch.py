"""A batch of cells: their servers started together, asked one after the other, ended together.

Nothing starts or ends beside a measurement: every server of the batch is ready and idle before the
first cell is measured, and is told to end after the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from knockon.bench.matrix.cells import Cell, Share
from knockon.bench.matrix.folder import FAILED, ResultsFolder
from knockon.bench.matrix.measure import failure, measure_cell, serve_arguments
from knockon.bench.matrix.progress import Progress
from knockon.bench.matrix.server import POLL, ServerFailed, ServerProcess
from knockon.bench.matrix.settings import MatrixSettings

Record = dict[str, Any]


def run_batch(
    settings: MatrixSettings,
    cells: Sequence[Cell],
    folder: ResultsFolder,
    share: Share,
    told: Progress,
    measured: Callable[[Cell, Record], None],
) -> dict[Cell, Record]:
    """Measure cells, each on its own server, and write each record as soon as it is known.

    A cell's ``seconds`` are those of its measurement and its part of the batch's start and end.

    Args:
        measured: called for each cell but the last, whose record waits for the servers' end.

    Returns:
        The records, in order; what fails is a record too.
    """
    records: dict[Cell, Record] = {}
    servers: dict[Cell, ServerProcess] = {}
    with ExitStack() as stack:
        began = time.perf_counter()
        for place, cell in enumerate(cells):
            arguments = serve_arguments(settings, cell)
            records[cell] = {
                "cell": vars(cell),
                "status": FAILED,
                "serve": arguments,
                "servers_ahead": settings.servers_ahead,
                "share": str(share),
            }
            server = ServerProcess(arguments, folder.log(share, place))
            servers[cell] = stack.enter_context(server)
        wait_for_all(settings, servers, records, told)
        starting = (time.perf_counter() - began) / len(cells)
        for number, cell in enumerate(cells, 1):
            told.cell(cell, settings.requests_of(cell.workload, cell.concurrency))
            record = records[cell]
            if "start" in record:
                record |= measure_cell(settings, cell, servers[cell], told.doing, told.ended)
            record["seconds"] = record.get("seconds", 0.0) + starting
            folder.write(cell, record)
            if number < len(cells):
                measured(cell, record)
        told.doing("stopping")
        began = time.perf_counter()
        for server in servers.values():
            server.ask_to_end()
        for cell, server in servers.items():
            records[cell]["exit_code"] = server.stop()
            records[cell]["stop_seconds"] = time.perf_counter() - began
        stopping = (time.perf_counter() - began) / len(cells)
    for cell, record in records.items():
        record["seconds"] += stopping
        folder.write(cell, record)
    return records


def wait_for_all(
    settings: MatrixSettings,
    servers: dict[Cell, ServerProcess],
    records: dict[Cell, Record],
    told: Progress,
) -> None:
    """Until each server is ready or has failed to start, which its cell's record then tells."""
    waiting = dict(servers)
    while waiting:
        told.doing(f"starting, {len(servers) - len(waiting)} of {len(servers)} ready")
        for cell, server in list(waiting.items()):
            try:
                start = server.look(settings.start_timeout)
            except ServerFailed as error:
                records[cell] |= failure(error, server)
                server.stop()
            else:
                if start is None:
                    continue
                records[cell]["start"] = vars(start)
            del waiting[cell]
        time.sleep(POLL if waiting else 0)
