"""The tables, in the layout of the published ones: workloads down, methods across."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from knockon.bench.matrix.methods import TARGET, ServedMethod
from knockon.bench.matrix.report.blocks import Entry, Table
from knockon.bench.matrix.report.results import Results, Sample
from knockon.bench.workload_files import title_of

NOT_MEASURED, FAILED = "–", "failed"


def throughput_table(results: Results, concurrency: int) -> Table:
    """Output tokens a second and speed-up; the fastest that speculates is bold."""

    def entry(method: ServedMethod, workload: str) -> Entry:
        found = results.throughput(method.name, workload, concurrency)
        if found is None:
            return absent(results, method.name, workload, concurrency)
        ratio = results.speed_up(method.name, workload, concurrency)
        times = "" if ratio is None else f"{ratio:.2f}x"
        return Entry(with_spread(found, 1, results.repeats), aside=times)

    rows = []
    for workload in results.workloads:
        best = fastest(results, workload, concurrency)
        rows.append(_row(title_of(workload), results.methods, workload, entry, {best}))
    return Table(["Workload", *(method.title for method in results.methods)], rows)


def fastest(results: Results, workload: str, concurrency: int) -> str | None:
    """The fastest method that speculates, where there are two or more to choose from."""
    found = {
        method.name: sample.mean
        for method in results.drafted
        if (sample := results.throughput(method.name, workload, concurrency)) is not None
    }
    return max(found, key=found.__getitem__) if len(found) > 1 else None


def macro_table(results: Results) -> Table:
    """Mean speed-ups by concurrency, and over all."""
    groups: list[tuple[str, Sequence[int]]] = [(str(c), [c]) for c in results.concurrencies]
    if len(groups) > 1:
        groups.append(("Overall", results.concurrencies))
    rows = []
    for title, concurrencies in groups:
        found = {m.name: results.macro(m.name, concurrencies) for m in results.drafted}
        whole = {name: each.mean for name, each in found.items() if each and each.complete}
        best = max(whole, key=whole.__getitem__) if len(whole) > 1 else None
        row = [Entry(title)]
        for method in results.drafted:
            macro = found[method.name]
            if macro is None:
                row.append(Entry(NOT_MEASURED))
                continue
            part = "" if macro.complete else f" ({macro.count} of {macro.of})"
            row.append(Entry(f"{macro.mean:.2f}x{part}", method.name == best))
        rows.append(row)
    return Table(["In flight", *(method.title for method in results.drafted)], rows)


def accept_table(results: Results, concurrency: int) -> Table:
    """Accept lengths; the longest of those that may reach the same is bold."""

    def entry(method: ServedMethod, workload: str) -> Entry:
        found = results.accept_length(method.name, workload, concurrency)
        if found is None:
            return absent(results, method.name, workload, concurrency)
        return Entry(with_spread(found, 3, results.repeats))

    rows = []
    for workload in results.workloads:
        best = longest(results, workload, concurrency)
        rows.append(_row(title_of(workload), results.drafted, workload, entry, best))
    return Table(["Workload", *(method.title for method in results.drafted)], rows)


def longest(results: Results, workload: str, concurrency: int) -> set[str | None]:
    """Of each group of methods with the same greatest accept length, the best of two or more."""
    groups: dict[int, dict[str, float]] = {}
    for method in results.drafted:
        found = results.accept_length(method.name, workload, concurrency)
        most = results.most(method)
        if found is not None and most is not None:
            groups.setdefault(most, {})[method.name] = found.mean
    return {max(g, key=g.__getitem__) for g in groups.values() if len(g) > 1}


def equal_table(results: Results, concurrency: int) -> Table:
    """Answers that equal the target's own."""

    def entry(method: ServedMethod, workload: str) -> Entry:
        found = results.equal_answers(method.name, workload, concurrency)
        return Entry(NOT_MEASURED if found is None else f"{found[0]} of {found[1]}")

    columns = [
        "target-only again" if method.kind == TARGET else method.title for method in results.methods
    ]
    rows = [_row(title_of(w), results.methods, w, entry, set()) for w in results.workloads]
    return Table(["Workload", *columns], rows)


def latency_table(results: Results, concurrency: int) -> Table:
    """Mean TTFT and TPOT, in milliseconds."""

    def entry(method: ServedMethod, workload: str) -> Entry:
        first = results.sample(method.name, workload, concurrency, "ttft.mean")
        each = results.sample(method.name, workload, concurrency, "tpot.mean")
        if first is None or each is None:
            return absent(results, method.name, workload, concurrency)
        return Entry(f"{first.mean:.0f} / {each.mean:.2f}")

    rows = [_row(title_of(w), results.methods, w, entry, set()) for w in results.workloads]
    return Table(["Workload", *(method.title for method in results.methods)], rows)


def start_table(results: Results) -> Table:
    """Where the time of a cell went besides its measurement, by method; means over all cells."""
    columns = ["Method", "cells", "listening", "ready", "graphs", "of it capture", "stop", "cell"]
    rows = []
    for method in results.methods:
        records = [r for cell, r in results.done.items() if cell.method == method.name]
        if not records:
            continue
        starts = [record["start"] for record in records]
        # Not of a cell after which the matrix was killed.
        stopped = [record for record in records if "stop_seconds" in record]
        row = [
            method.title,
            str(len(records)),
            f"{_mean(starts, 'listening'):.2f}",
            f"{_mean(starts, 'ready'):.2f}",
            f"{_mean(starts, 'graphs'):.0f}",
            f"{_mean(starts, 'capture'):.2f}",
            f"{_mean(stopped, 'stop_seconds'):.2f}" if stopped else "",
            f"{_mean(records, 'seconds'):.1f}",
        ]
        rows.append([Entry(text) for text in row])
    return Table(columns, rows)


def _mean(records: Sequence[dict[str, Any]], name: str) -> float:
    return sum(float(record[name]) for record in records) / len(records)


def with_spread(sample: Sample, digits: int, repeats: int) -> str:
    """``"248.0 ± 1.2"``, and how many repeats it is of where some are missing."""
    text = f"{sample.mean:.{digits}f}"
    if sample.half_range is not None and f"{sample.half_range:.{digits}f}".strip("0."):
        text += f" ± {sample.half_range:.{digits}f}"
    count = len(sample.values)
    return text + (f" [{count} of {repeats}]" if count < repeats else "")


def absent(results: Results, method: str, workload: str, concurrency: int) -> Entry:
    """Why an entry has no number."""
    cells = results.cells(method, workload, concurrency)
    return Entry(FAILED if any(cell in results.failed for cell in cells) else NOT_MEASURED)


def _row(
    title: str,
    methods: Sequence[ServedMethod],
    workload: str,
    entry: Callable[[ServedMethod, str], Entry],
    bold: set[str | None],
) -> list[Entry]:
    found = [replace(entry(method, workload), bold=method.name in bold) for method in methods]
    return [Entry(title), *found]
