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
    if report.alternations:
        console.print(alternation_table(report))
    if report.profiled:
        console.print(parts_table(report))
    for label, facts in report.facts.items():
        told = [] if facts.memory is None else [f"{facts.memory / 2**30:.1f} GiB at most"]
        if facts.rollout is not None:
            why = f" ({facts.why_plain})" if facts.why_plain else ""
            told.append(f"{facts.rollout} rollout{why}")
        if facts.graphs:
            told.append(f"{facts.graphs} graphs captured in {facts.capture_seconds:.1f} s")
        if facts.prompts_by is not None:
            told.append(f"prompts of recurrent layers by {facts.prompts_by}")
            told.append(f"states in {facts.state_dtype}")
        if told:
            console.print(f"{label}: {', '.join(told)}.")


def speed_table(report: EngineReport, concurrency: int) -> Table:
    """Every variant at one concurrency."""
    plural = "" if concurrency == 1 else "s"
    table = Table(title=f"{concurrency} request{plural} in flight", title_justify="left")
    table.add_column("method")
    headings = ["tok/s", "step ms", "accept length", "TTFT ms", "TPOT ms", "× target"]
    adaptive = any(not variant.fixed for variant in report.settings.variants)
    if adaptive:
        headings += ["× best fixed", "steps by width"]
    if report.reference is not None:
        headings += [f"{report.reference.name} tok/s", "step ms", "× it"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for found in report.measurements:
        if found.concurrency != concurrency:
            continue
        row = [
            found.variant.label,
            f"{found.tokens_per_second:.1f}",
            _number(found.step_ms, 2),
            f"{found.accept_length:.2f}",
            f"{found.time_to_first_token_ms:.1f}",
            f"{found.time_per_token_ms:.2f}",
            _number(report.speed_up(found), 2),
        ]
        if adaptive:
            shares = "" if found.variant.fixed else _shares(found.widths)
            row += [_number(report.against_best_fixed(found), 3), shares]
        if report.reference is not None:
            key = (found.variant.method, concurrency)
            row += [
                _number(report.reference.tokens_per_second.get(key), 1),
                _number(report.reference.step_ms.get(key), 2),
                _number(report.against_reference(found), 2),
            ]
        table.add_row(*row)
    return table


def alternation_table(report: EngineReport) -> Table:
    """Every drafting variant over the alternating trace."""
    low, high = report.alternations[0].low, report.alternations[0].high
    times = report.settings.alternations
    title = f"Requests in flight alternating between {low} and {high}, {times} times each"
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    headings = ("tok/s", f"at {low}", f"at {high}", "× best fixed")
    for heading in (*headings, f"steps by width at {low}", f"at {high}"):
        table.add_column(heading, justify="right")
    for found in report.alternations:
        adaptive = not found.variant.fixed
        table.add_row(
            found.variant.label,
            f"{found.tokens_per_second:.1f}",
            f"{found.at_low:.1f}",
            f"{found.at_high:.1f}",
            _number(report.against_best_fixed(found), 3),
            *(_shares(found.widths(first)) if adaptive else "" for first in (0, 1)),
        )
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
            found.variant.label,
            str(found.concurrency),
            *(f"{profile.parts_ms[part]:.3f}" for part in PARTS),
            f"{profile.busy_ms:.2f}",
            f"{profile.wall_ms:.2f}",
            "-" if profile.idle is None else f"{profile.idle:.1%}",
        )
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _shares(shares: dict[int, float]) -> str:
    """``"8: 97%, 16: 3%"``."""
    return ", ".join(f"{width}: {share:.0%}" for width, share in shares.items())
