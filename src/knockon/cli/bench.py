"""``knockon bench``: measurements that anyone can repeat."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from knockon.cli import bench_options
from knockon.cli.bench_acceptance import acceptance
from knockon.cli.bench_engine import engine
from knockon.cli.bench_matrix import matrix
from knockon.cli.bench_report import report
from knockon.cli.bench_serving import serving

app = typer.Typer(help="Measure parts of Knockon on this machine.", no_args_is_help=True)


app.command("engine", short_help="The engine's throughput, on random weights.")(engine)
app.command("serving", short_help="Any OpenAI-compatible server, on a dataset.")(serving)
app.command("acceptance", short_help="Accept lengths of drafters on real prompts.")(acceptance)
app.command(
    "matrix",
    short_help="Methods x workloads x concurrencies, a server each.",
    context_settings={"allow_extra_args": True},
)(matrix)
app.command("report", short_help="A matrix's tables and plots.")(report)


@app.command("rollout", short_help="The Domino rollout, stage by stage.")
def rollout(
    shape: Annotated[
        str | None,
        typer.Option(
            help="qwen3.6-27b, qwen3-8b, qwen3.5-4b, tiny, or the path of a Domino drafter's "
            "config.json.",
            show_default="qwen3.6-27b on CUDA, tiny on a CPU",
        ),
    ] = None,
    tp_size: Annotated[
        int | None,
        typer.Option(
            help="Ranks, one process each: a GPU each (NCCL), or on the CPU (gloo). Under torchrun "
            "its ranks are used.",
            show_default="1, or torchrun's",
        ),
    ] = None,
    one_rank_of: Annotated[
        int | None,
        typer.Option(
            help="Time one rank's work of that many in one process, each collective replaced by a "
            "local copy of the same size. Tokens are then not meaningful.",
        ),
    ] = None,
    batches: Annotated[str, typer.Option(help="Requests in a block.")] = "1,8,64",
    stages: Annotated[
        str,
        typer.Option(
            help="base: packing and the LM head alone. A: K = 0. B: pool of K, full gather. "
            "C: pool of K, compact exchange.",
        ),
    ] = "base,A,B,C",
    implementation: Annotated[
        str | None,
        typer.Option(
            help="plain: PyTorch operators. fused: Triton kernels for B and C on CUDA. Several "
            "with commas between.",
            show_default="all that the device runs",
        ),
    ] = None,
    pool_size: Annotated[int, typer.Option(help="K, the candidate pool of B and C.")] = 2048,
    steps: Annotated[
        int | None, typer.Option(help="Proposals a block.", show_default="block size - 1")
    ] = None,
    dtype: bench_options.Dtype = "auto",
    device: bench_options.Device = "auto",
    rounds: Annotated[
        int | None,
        typer.Option(help="Rounds; the median is shown.", show_default="5 on CUDA, 3 on a CPU"),
    ] = None,
    replays: Annotated[
        int | None,
        typer.Option(
            help="Blocks in a row per round; their mean counts.",
            show_default="100 on CUDA, 5 on a CPU",
        ),
    ] = None,
    check_proposals: Annotated[
        int,
        typer.Option(
            help="Proposal ids to compare at least, over all batches, before timing: graph and "
            "eager, every rank, B and C."
        ),
    ] = 1095,
    draft_head_dtype: Annotated[
        str,
        typer.Option(
            help="auto: the LM head of --dtype. fp8: base and C once more, with an FP8 copy of it."
        ),
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Fixes weights and inputs.")] = 0,
    as_json: bench_options.JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw a bar chart: .png, .svg or .pdf. Needs matplotlib.")
    ] = None,
) -> None:
    """Time the tensor-parallel Domino rollout, stage by stage, on random weights.

    It measures what lies between the drafted block and the proposals: step-major packing, the LM
    head, the exchange between ranks, candidates, correction and GRU. Drafting itself and the
    target's verification are not part of it. On CUDA whole blocks are replayed as graphs.
    """
    from rich.console import Console

    from knockon.bench.comma_lists import parse_names, parse_numbers
    from knockon.bench.rollout.plot import write_plot
    from knockon.bench.rollout.ranks import decide_tp_size, ranks_for
    from knockon.bench.rollout.run import measure
    from knockon.bench.rollout.settings import settle
    from knockon.bench.rollout.table import print_tables
    from knockon.cli.result_files import check_result_files, write_result
    from knockon.parallel.torchrun import is_first_rank

    settings = settle(
        shape=shape,
        device=device,
        dtype=dtype,
        tp_size=decide_tp_size(tp_size, one_rank_of),
        one_rank_of=one_rank_of,
        batches=parse_numbers("batches", batches),
        stages=parse_names(stages),
        implementations=None if implementation in (None, "auto") else parse_names(implementation),
        pool_size=pool_size,
        steps=steps,
        rounds=rounds,
        replays=replays,
        check_proposals=check_proposals,
        seed=seed,
        draft_head_dtype=draft_head_dtype,
    )
    check_result_files(as_json, plot)
    first = is_first_rank()
    log = Console(stderr=True, quiet=not first, highlight=False)
    with log.status("making weights") as status, ranks_for(settings) as ranks:
        report = measure(settings, ranks, doing=status.update, done=log.print)
    if not first:
        return
    # Into a file or a pipe, tables keep their full width.
    print_tables(report, Console(highlight=False, width=None if sys.stdout.isatty() else 140))
    write_result(report.to_json(), as_json, plot, lambda path: write_plot(report, path))
