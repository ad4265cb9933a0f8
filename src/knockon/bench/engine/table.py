"""A report as text: a table a concurrency, then where a step's time went."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from knockon.bench.engine.parts import PARTS
from knockon.bench.engine.report import EngineReport


def print_tables(report: EngineReport, console: Console) -> None:
    """Print speeds, step times by part, and what each method ran on."""
    console.print(report.title)
    console.print(report.method)
    reference = report.reference
    for concurrency in report.settings.concurrency:
        console.print(speed_table(report, concurrency))
    if reference is not None:
        console.print(f"{reference.name}: {reference.measured}.")
        different = reference.differences(report.settings)
        if different:
            console.print(f"It was not measured alike: {different}.")
    if report.profiled:
        console.print(parts_table(report))
    for method, facts in report.facts.items():
        told = [] if facts.memory is None else [f"{facts.memory / 2**30:.1f} GiB at most"]
        if facts.rollout is not None:
            why = f" ({facts.why_plain})" if facts.why_plain else ""
            told.append(f"{facts.rollout} rollout{why}")
        if told:
            console.print(f"{method}: {', '.join(told)}.")


def speed_table(report: EngineReport, concurrency: int) -> Table:
    """Methods at one concurrency."""
    plural = "" if concurrency == 1 else "s"
    table = Table(title=f"{concurrency} request{plural} in flight", title_justify="left")
    table.add_column("method")
    headings = ["tok/s", "step ms", "accept length", "TTFT ms", "TPOT ms", "× target"]
    if report.reference is not None:
        headings += [f"{report.reference.name} tok/s", "step ms", "× it"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for found in report.measurements:
        if found.concurrency != concurrency:
            continue
        row = [
            found.method,
            f"{found.tokens_per_second:.1f}",
            _number(found.step_ms, 2),
            f"{found.accept_length:.2f}",
            f"{found.time_to_first_token_ms:.1f}",
            f"{found.time_per_token_ms:.2f}",
            _number(report.speed_up(found), 2),
        ]
        if report.reference is not None:
            key = (found.method, concurrency)
            row += [
                _number(report.reference.tokens_per_second.get(key), 1),
                _number(report.reference.step_ms.get(key), 2),
                _number(report.against_reference(found), 2),
            ]
        table.add_row(*row)
    return table


def parts_table(report: EngineReport) -> Table:
    """Milliseconds of a full decode step by part."""
    profiled = [(found, found.profile) for found in report.measurements]
    kinds = {profile.kind for _, profile in profiled if profile is not None}
    title = f"Milliseconds of a decode step by part ({', '.join(kinds)}, while traced)"
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    for heading in ("in flight", *PARTS, "all", "wall", "GPU idle"):
        table.add_column(heading, justify="right")
    for found, profile in profiled:
        if profile is None:
            continue
        table.add_row(
            found.method,
            str(found.concurrency),
            *(f"{profile.parts_ms[part]:.3f}" for part in PARTS),
            f"{profile.busy_ms:.2f}",
            f"{profile.wall_ms:.2f}",
            "-" if profile.idle is None else f"{profile.idle:.1%}",
        )
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
