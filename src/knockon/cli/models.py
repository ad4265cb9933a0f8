"""``knockon models``: what the catalogue offers, and bringing it onto this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from knockon.models import catalog

app = typer.Typer(
    help="Models that Knockon knows by name. Any local folder, GGUF file or hub id works as well.",
    no_args_is_help=True,
)


@app.command("list")
def list_models() -> None:
    """Show the catalogue: name, kind, size, licence and where each model lies."""
    rows = [("name", "kind", "size", "licence", "where")]
    for entry in catalog.entries():
        absent = "not pulled" if entry.wheel is not None else "not in this installation"
        size = "-" if entry.size is None else f"{entry.size / 1e6:.0f} MB"
        where = catalog.location(entry) or absent
        rows.append((entry.name, entry.kind, size, entry.licence, str(where)))
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


@app.command("pull")
def pull(
    name: Annotated[str, typer.Argument(help="A name that `knockon models list` shows.")],
) -> None:
    """Bring a model onto this machine, checked against its pinned SHA-256."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskID,
        TextColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage == "waiting":
                bars.console.print("another pull of this model is running; waiting for it")
                return
            if stage not in tasks:
                tasks[stage] = bars.add_task(f"{stage} {name}", total=total)
            bars.update(tasks[stage], completed=done, total=total)

        path = catalog.pull(name, show)
    print(f"{name}: {path}")
