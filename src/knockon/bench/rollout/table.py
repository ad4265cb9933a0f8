"""A report as text: milliseconds by stage, then what each stage gains."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from knockon.bench.rollout.report import GAINS, Measurement, RolloutReport
from knockon.bench.rollout.variants import BASE, HEADS, STAGES


def print_tables(report: RolloutReport, console: Console) -> None:
    """Print the times, the gains, and what was checked and held."""
    console.print(report.title)
    console.print(report.method)
    console.print(times_table(report))
    console.print(gains_table(report))
    console.print(cost_table(report))
    facts = report.facts
    copy = f" and {_size(facts.fp8_head_bytes)} of LM head in FP8" if facts.fp8_head_bytes else ""
    console.print(
        f"Each rank holds {_size(facts.weight_bytes)} of weights (LM head, which serves as the "
        f"embedding too, and Domino head) and {_size(facts.gate_table_bytes)} of gate table{copy}."
    )
    if facts.fp8_head_bytes:
        console.print("Beyond base: beyond that of the run's own LM head, for the FP8 head too.")
    if not report.checked:
        console.print(
            "No proposals were compared: there is one rank, no CUDA graph to hold to eager calls, "
            "and not both B and C of ranks that exchange real contents."
        )
    for what, count in report.checked.items():
        console.print(f"{what}: {count} proposal ids checked, no difference.")


def times_table(report: RolloutReport) -> Table:
    """Milliseconds a block: a row a batch size, a column a variant."""
    table = Table(title="Milliseconds a block", title_justify="left")
    table.add_column("batch", justify="right")
    pool = report.settings.pool_size
    for variant in report.settings.variants:
        meaning = {BASE: "", "A": ": K=0", "B": f": K={pool}, full", "C": f": K={pool}, compact"}
        table.add_column(f"{variant.label}{meaning[variant.stage]}", justify="right")
    for batch in report.settings.batches:
        row = [f"{found.ms:.3f}" for found in report.measurements if found.batch == batch]
        table.add_row(str(batch), *row)
    return table


def gains_table(report: RolloutReport) -> Table:
    """Percent saved from stage to stage, and milliseconds beyond base."""
    table = Table(title="Time saved from stage to stage, and ms beyond base", title_justify="left")
    several = len(report.kinds) > 1
    table.add_column("batch", justify="right")
    if several:
        table.add_column("implementation")
    for start, stop in GAINS:
        table.add_column(f"{start} → {stop}", justify="right")
    stages = [stage for stage in STAGES if stage != BASE]
    for stage in stages:
        table.add_column(f"{stage} beyond base", justify="right")
    for batch in report.settings.batches:
        for implementation, head in report.kinds:
            name = implementation if head == HEADS[0] else f"{head} {implementation}"
            row = [str(batch), *([name] if several else [])]
            for gain in report.gains(batch, implementation, head).values():
                row.append("-" if gain is None else f"{gain:.1f}%")
            for stage in stages:
                found = report.at(batch, stage, implementation, head)
                beyond = None if found is None else report.beyond_base(found)
                row.append("-" if beyond is None else f"{beyond:.3f}")
            table.add_row(*row)
    return table


def cost_table(report: RolloutReport) -> Table:
    """Collectives a block, bytes of their results, and peak memory beyond weights and table."""
    table = Table(title="Cost of a block on each rank", title_justify="left")
    for heading in ("batch", "stage", "collectives", "their results", "extra memory"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for found in report.measurements:
        extra = "not measured" if found.extra_bytes is None else _size(found.extra_bytes)
        crossing = _size(sum(found.collective_bytes.values()))
        table.add_row(str(found.batch), found.variant.label, _calls(found), crossing, extra)
    return table


def _calls(found: Measurement) -> str:
    if not found.collectives:
        return "none"
    calls = " + ".join(f"{count} {name}" for name, count in found.collectives.items())
    traced = found.traced_collectives
    return calls if traced is None else f"{calls} ({traced} in a profile)"


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
