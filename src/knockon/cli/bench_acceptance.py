"""``knockon bench acceptance``: how many tokens a verification gives, by drafter and workload."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from knockon.cli import bench_options, options


def acceptance(
    model: options.ModelArgument,
    domino: Annotated[str | None, typer.Option(help="A Domino drafter.")] = None,
    dflash: Annotated[str | None, typer.Option(help="A DFlash drafter.")] = None,
    mtp: Annotated[
        str | None, typer.Option(help="An MTP head, or own: the one among the target's weights.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: target, mtp-sN, dflash-bN, domino-bN; N proposals of an MTP "
            "head, or N positions verified.",
            show_default="target, s3/s7/s15 and b8/b16 of the checkpoints given",
        ),
    ] = None,
    workloads: Annotated[
        list[Path] | None,
        typer.Option(
            help='Files of JSON lines with "turns", or a folder of them; may be given several '
            "times.",
            show_default="a few samples of each of six kinds",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="First prompts of each workload.", min=1)
    ] = None,
    max_tokens: options.MaxTokens = 256,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests in flight.", show_default="1 on a CPU, 8 on CUDA")
    ] = None,
    temperature: options.Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Request i of a workload draws with seed + i.")] = 0,
    pool_size: options.PoolSize = 2048,
    tp_size: options.TpSize = 1,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    as_json: bench_options.JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw a bar chart: .png, .svg or .pdf. Needs matplotlib.")
    ] = None,
) -> None:
    """Measure accept lengths and speeds of drafters on real prompts, with the engine that serves.

    Every method answers the same prompts. With the target alone among the methods, every answer
    is held to its tokens; --dtype float32 leaves no room for near ties.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from knockon.bench.acceptance.methods import Checkpoints, choose_methods
    from knockon.bench.acceptance.plot import write_plot
    from knockon.bench.acceptance.report import AcceptanceSettings
    from knockon.bench.acceptance.run import measure
    from knockon.bench.acceptance.table import print_tables
    from knockon.bench.acceptance.workloads import load_workloads
    from knockon.bench.comma_lists import parse_names
    from knockon.cli.result_files import check_result_files, write_result
    from knockon.engine.defaults import choose_device
    from knockon.engine.hardware import detect
    from knockon.models.catalog import resolve

    asked = None if methods is None else parse_names(methods)
    chosen = choose_methods(resolve(model), Checkpoints(mtp, dflash, domino), asked)
    prompts = load_workloads(workloads or [], limit)
    where = choose_device(detect()).value if device == "auto" else device
    settings = AcceptanceSettings(
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        concurrency=concurrency or (8 if where == "cuda" else 1),
        pool_size=pool_size,
        tp_size=tp_size,
        device=where,
        dtype=dtype,
    )
    check_result_files(as_json, plot)
    log = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=log, transient=True) as progress:
        task = progress.add_task("", total=len(chosen) * sum(len(w.prompts) for w in prompts))
        report = measure(
            settings,
            chosen,
            prompts,
            doing=lambda text: progress.update(task, description=text),
            ended=lambda: progress.advance(task),
            done=progress.console.print,
        )
    # Into a file or a pipe, tables keep their full width.
    print_tables(report, Console(highlight=False, width=None if sys.stdout.isatty() else 160))
    write_result(report.to_json(), as_json, plot, lambda path: write_plot(report, path))
