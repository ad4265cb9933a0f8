"""A report as text, in the layout of the published tables: workloads down, methods across."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from knockon.bench.acceptance.methods import TARGET, Method
from knockon.bench.acceptance.report import AcceptanceReport
from knockon.bench.acceptance.workloads import Workload


def print_tables(report: AcceptanceReport, console: Console) -> None:
    """Print accept lengths, then speeds, then where texts differ from the target's alone."""
    console.print(report.title)
    console.print(report.method)
    drafted = [method for method in report.methods if method.kind != TARGET]
    if drafted:
        console.print(accept_table(report, drafted))
    console.print(speed_table(report))
    compared = [
        (cell.same, cell.prompts)
        for (name, _), cell in report.cells.items()
        if cell.same is not None and name != TARGET
    ]
    if compared:
        same, asked = (sum(column) for column in zip(*compared, strict=True))
        console.print(
            f"{same} of {asked} answers are the target's own, token for token"
            + ("." if same == asked else "; in low precision a near tie may fall either way.")
        )


def accept_table(report: AcceptanceReport, methods: list[Method]) -> Table:
    """Accept lengths, the overall mean below."""

    def entry(method: Method, workload: Workload | None) -> str:
        if workload is None:
            return f"{report.mean(method, lambda cell: cell.accept_length):.3f}"
        return f"{report.cells[method.name, workload.name].accept_length:.3f}"

    return _table("Accept length", report, methods, entry)


def speed_table(report: AcceptanceReport) -> Table:
    """Tokens a second, and how many times the target's alone."""

    def entry(method: Method, workload: Workload | None) -> str:
        ratio = report.speed_up(method, workload)
        times = "" if ratio is None else f" ({ratio:.2f}x)"
        if workload is None:
            return f"{report.mean(method, lambda cell: cell.tokens_per_second):.1f}{times}"
        return f"{report.cells[method.name, workload.name].tokens_per_second:.1f}{times}"

    title = f"Output tokens a second, {report.settings.concurrency} in flight"
    return _table(title, report, list(report.methods), entry)


def _table(
    title: str,
    report: AcceptanceReport,
    methods: list[Method],
    entry: Callable[[Method, Workload | None], str],
) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("workload")
    for method in methods:
        table.add_column(method.title, justify="right")
    for workload in report.workloads:
        table.add_row(workload.title, *(entry(method, workload) for method in methods))
    table.add_section()
    table.add_row("mean", *(entry(method, None) for method in methods))
    return table
