"""``knockon bench report``: a matrix's results as tables, plots and a page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def report(
    results: Annotated[
        Path, typer.Argument(help="Folder of `knockon bench matrix`.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the report's files.", show_default="that of the results"),
    ] = None,
) -> None:
    """Write report.md, plots as PNG, and report.html, which holds everything in one file.

    It works while a matrix is under way: what is not measured is shown as missing.
    """
    from knockon.bench.matrix.report.write import HTML, MARKDOWN, write_report

    folder = out or results
    print(write_report(results, folder), end="")
    print(f"written: {folder / MARKDOWN}, {folder / HTML} and plots beside", file=sys.stderr)
