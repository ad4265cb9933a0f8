"""The report, section by section, as blocks."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from knockon.bench.matrix.methods import TARGET
from knockon.bench.matrix.report.blocks import (
    Block,
    Code,
    Heading,
    Picture,
    Points,
    Table,
    Text,
)
from knockon.bench.matrix.report.facts import facts, machines, on_cpu
from knockon.bench.matrix.report.results import Results
from knockon.bench.matrix.report.tables import (
    accept_table,
    equal_table,
    latency_table,
    macro_table,
    start_table,
    throughput_table,
)

THROUGHPUT, MACRO, ACCEPT = "throughput.png", "macro.png", "accept_length.png"
_LISTED = 20
_SPREAD = (
    "Means over repeats; ± is half of what lies between the slowest and the fastest repeat, left "
    "out where it rounds to nothing."
)


def sections(results: Results) -> list[Block]:
    """Everything, in order."""
    return [
        *_opening(results),
        *_throughput(results),
        *_macro(results),
        *_accept(results),
        *_equal(results),
        *_latency(results),
        *_starts(results),
        *_gaps(results),
        *_servers(results),
    ]


def title(results: Results) -> str:
    """What was measured on what."""
    where = " and ".join(machines(results)) or "no machine yet"
    return f"Serving {results.model} on {where}"


def _opening(results: Results) -> list[Block]:
    found: list[Block] = [Heading(1, title(results))]
    if on_cpu(results):
        found.append(Text("Measured on a CPU. No number here says anything of a GPU.", loud=True))
    if len(machines(results)) > 1:
        counts = ", ".join(f"{count} cells on {name}" for name, count in machines(results).items())
        found.append(Text(f"Measured on several machines: {counts}.", loud=True))
    missing, failed = len(results.missing()), len(results.failed)
    if missing or failed:
        told = f"Incomplete: {missing} cells are not measured, {failed} failed; see below."
        found.append(Text(told, loud=True))
    return [*found, Points(facts(results))]


def _throughput(results: Results) -> list[Block]:
    text = (
        "Output tokens over the whole duration of a cell (speed-up: means over that of target-only "
        f"at the same workload and concurrency). {_SPREAD} Bold: the fastest that speculates."
    )
    found: list[Block] = [Heading(2, "Throughput and speed-up"), Text(text)]
    return [
        *found,
        *_by_concurrency(results, throughput_table),
        Picture(THROUGHPUT, "Output tokens a second; outlined: the fastest that speculates"),
    ]


def _macro(results: Results) -> list[Block]:
    if not results.drafted or TARGET not in [method.kind for method in results.methods]:
        return []
    text = (
        "Arithmetic mean of the speed-ups of all workloads, each counting alike; overall, of all "
        "workloads and concurrencies. Where some are missing it says of how many, and is not "
        "compared."
    )
    return [
        Heading(2, "Macro speed-up over target-only"),
        Text(text),
        macro_table(results),
        Picture(MACRO, "Macro speed-up"),
    ]


def _accept(results: Results) -> list[Block]:
    if not results.drafted:
        return []
    text = (
        "Output tokens a verification, the target's bonus token included; at most 4, 8, 16 for "
        "MTP-S3, S7, S15 and the block for bN. Bold: the longest among methods with the same most."
    )
    return [
        Heading(2, "Accept length"),
        Text(text),
        *_by_concurrency(results, accept_table),
        Picture(ACCEPT, "Accept length; outlined: the longest"),
    ]


def _equal(results: Results) -> list[Block]:
    if results.settings["temperature"] != 0:
        return []
    text = (
        "Greedy answers whose text equals target-only's to the same prompt, at the same workload, "
        "concurrency and repeat. “Target-only again” holds its later repeats to its first: what "
        "differs there is rounding in batches of other make-up, with no drafter in play."
    )
    tables = _by_concurrency(results, equal_table)
    return [Heading(2, "Answers equal to target-only's"), Text(text), *tables]


def _latency(results: Results) -> list[Block]:
    text = (
        "Mean time to the first token / mean time of a token after it, in milliseconds; means over "
        "repeats."
    )
    return [Heading(2, "Latency"), Text(text), *_by_concurrency(results, latency_table)]


def _starts(results: Results) -> list[Block]:
    text = (
        "Seconds, means over cells: until the server listens, until it serves (CUDA graphs "
        "captured, and the seconds of that), to end it, and of a whole cell."
    )
    return [Heading(2, "Starting and stopping servers"), Text(text), start_table(results)]


def _gaps(results: Results) -> list[Block]:
    found: list[Block] = []
    if results.failed:
        cells = sorted(results.failed.items(), key=lambda item: item[0].name)
        found += [
            Heading(2, "Failed cells"),
            Points([f"{cell.name}: {record['error']}" for cell, record in cells]),
        ]
    missing = results.missing()
    if missing:
        names = [cell.name for cell in missing[:_LISTED]]
        if len(missing) > _LISTED:
            names.append(f"and {len(missing) - _LISTED} more")
        found += [Heading(2, "Cells not measured"), Points(names)]
    return found


def _servers(results: Results) -> list[Block]:
    lines = []
    for method in results.methods:
        record = next((r for c, r in results.done.items() if c.method == method.name), None)
        if record is not None:
            lines.append(f"knockon serve {shlex.join(record['serve'])}")
    if not lines:
        return []
    text = "One cell of each method; --max-running-requests is the concurrency."
    return [Heading(2, "What the servers were told"), Text(text), Code(lines)]


def _by_concurrency(results: Results, table: Callable[[Results, int], Table]) -> list[Block]:
    found: list[Block] = []
    for concurrency in results.concurrencies:
        found += [Heading(3, f"Concurrency {concurrency}"), table(results, concurrency)]
    return found
