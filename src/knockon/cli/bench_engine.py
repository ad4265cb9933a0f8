"""``knockon bench engine``: throughput of the real engine at real sizes, without real weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from knockon.cli import bench_options


def engine(
    model: Annotated[
        str | None,
        typer.Option(
            help="qwen3.6-27b, qwen3-8b, qwen3-4b, llama-3.1-8b, smollm2-135m, tiny, tiny-hybrid, "
            "or the path of a target's config.json. Only sizes are taken; weights are random.",
            show_default="qwen3-8b on CUDA, tiny on a CPU",
        ),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="target: no speculation. dflash: a block's own argmax. domino: rolled out."
        ),
    ] = "target,dflash,domino",
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Requests in flight, one table each.", show_default="1,8,32 on CUDA, 1,4 on a CPU"
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Requests of a measurement.", show_default="twice the concurrency"),
    ] = None,
    input_len: Annotated[
        int | None,
        typer.Option(help="Tokens of a prompt.", show_default="256 on CUDA, 32 on a CPU"),
    ] = None,
    output_len: Annotated[
        int | None,
        typer.Option(help="Tokens generated.", show_default="512 on CUDA, 64 on a CPU"),
    ] = None,
    accept_length: Annotated[
        str | None,
        typer.Option(
            help="Synthetic mean accept length of each method, METHOD=MEAN, where the whole block "
            "is verified: random drafts never agree by themselves, so a coin decides what is "
            "accepted.",
            show_default="dflash=6.878,domino=9.163",
        ),
    ] = None,
    narrow_accept_length: Annotated[
        str | None,
        typer.Option(
            help="METHOD@WIDTH=MEAN, e.g. domino@8=6.335: the mean accept length at a narrower "
            "width, where it is known to be another than the same law cut off."
        ),
    ] = None,
    verify_width: Annotated[
        str | None,
        typer.Option(
            help="Positions verified at a time: every drafting method runs at each of a list, e.g. "
            "8,16,auto. Narrower widths cut the same accept lengths off.",
            show_default="the block size, 16",
        ),
    ] = None,
    alternate: Annotated[
        str | None,
        typer.Option(
            help="LOW,HIGH: also serve a trace that goes back and forth between so many requests "
            "in flight, with every drafting method."
        ),
    ] = None,
    pool_size: Annotated[
        int, typer.Option(help="K, Domino's candidate pool; 0 scores the whole vocabulary.")
    ] = 2048,
    draft_head_dtype: Annotated[
        str, typer.Option(help="auto, or fp8: propose with a copy of the LM head in FP8.")
    ] = "auto",
    dtype: bench_options.Dtype = "auto",
    device: bench_options.Device = "auto",
    repeats: Annotated[
        int | None,
        typer.Option(
            help="Measurements; the median is shown.", show_default="3 on CUDA, 1 on a CPU"
        ),
    ] = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="Trace up to 20 more full steps and sum their time by part."
        ),
    ] = False,
    reference: Annotated[
        Path | None,
        typer.Option(help="Another engine's numbers to compare with: see benchmarks/references."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Fixes weights, prompts and accept lengths.")] = 0,
    as_json: bench_options.JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw a bar chart: .png, .svg or .pdf. Needs matplotlib.")
    ] = None,
) -> None:
    """Measure the engine's throughput on random weights of any published shape.

    The engine is the one that serves: scheduler, pages, prefill, drafting, verification. Prompts
    are random tokens, and what a drafter would have had accepted is drawn with a given mean, by
    the same rule for every method.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from knockon.bench.comma_lists import parse_names, parse_numbers
    from knockon.bench.engine.parsing import (
        parse_accept_lengths,
        parse_alternate,
        parse_narrow_accept_lengths,
        parse_verify_widths,
    )
    from knockon.bench.engine.plot import write_plot
    from knockon.bench.engine.reference import read_reference
    from knockon.bench.engine.run import measure, requests_in
    from knockon.bench.engine.settings import settle
    from knockon.bench.engine.table import print_tables
    from knockon.cli.result_files import check_result_files, write_result

    settings = settle(
        model=model,
        device=device,
        dtype=dtype,
        methods=parse_names(methods),
        concurrency=None if concurrency is None else parse_numbers("concurrency", concurrency),
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        verify_widths=None if verify_width is None else parse_verify_widths(verify_width),
        accept_lengths=None if accept_length is None else parse_accept_lengths(accept_length),
        narrow_accept_lengths=(
            None
            if narrow_accept_length is None
            else parse_narrow_accept_lengths(narrow_accept_length)
        ),
        pool_size=pool_size,
        draft_head_dtype=draft_head_dtype,
        alternate=None if alternate is None else parse_alternate(alternate),
        repeats=repeats,
        profile=profile,
        seed=seed,
    )
    theirs = None if reference is None else read_reference(reference)
    check_result_files(as_json, plot)
    log = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=log, transient=True) as progress:
        task = progress.add_task("", total=requests_in(settings))
        report = measure(
            settings,
            theirs,
            doing=lambda text: progress.update(task, description=text),
            ended=lambda: progress.advance(task),
            done=progress.console.print,
            # A run that is cut short leaves what it has measured.
            so_far=lambda found: write_result(found.to_json(), as_json, None, lambda path: None),
        )
    # Into a file or a pipe, tables keep their full width.
    print_tables(report, Console(highlight=False, width=None if sys.stdout.isatty() else 160))
    write_result(report.to_json(), as_json, plot, lambda path: write_plot(report, path))
