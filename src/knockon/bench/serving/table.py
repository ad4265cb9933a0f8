"""The summary as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from knockon.bench.serving.run import ServingReport


def print_table(report: ServingReport, console: Console) -> None:
    """Print what a run found."""
    found = report.summary
    title = f"{report.model}, {report.settings.dataset.name}"
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    rows = [
        ("requests", f"{found.completed}" + (f", {found.failed} failed" if found.failed else "")),
        ("duration", f"{found.duration:.2f} s"),
        ("prompt tokens", f"{found.prompt_tokens}"),
        ("output tokens", f"{found.output_tokens}"),
        ("requests/s", f"{found.request_throughput:.2f}"),
        ("output tok/s", f"{found.output_throughput:.2f}"),
        ("total tok/s", f"{found.total_throughput:.2f}"),
        ("mean concurrency", f"{found.concurrency:.2f}"),
        ("accept length", f"{found.accept_length:.3f}" if found.accept_length else "not told"),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    times = Table(title="milliseconds", title_justify="left")
    for name in ("", "mean", "median", "p99"):
        times.add_column(name, justify="right" if name else "left")
    for name in ("e2e", "ttft", "tpot", "itl"):
        spread = getattr(found, name)
        times.add_row(
            name.upper(), f"{spread.mean:.2f}", f"{spread.median:.2f}", f"{spread.p99:.2f}"
        )
    console.print(times)
    for error in sorted({each.error for each in report.requests if each.error})[:5]:
        console.print(f"failed: {error}", markup=False)
