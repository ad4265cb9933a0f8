"""``knockon bench matrix``: methods × workloads × concurrencies, a fresh server for each cell."""

from __future__ import annotations

import importlib.util
import json
import math
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knockon.cli import options
from knockon.cli.foreign_flags import answer_foreign_flags
from knockon.errors import Refused

if TYPE_CHECKING:
    from knockon.bench.matrix.cells import Cell, Share
    from knockon.bench.matrix.folder import ResultsFolder
    from knockon.bench.matrix.settings import MatrixSettings

# What the matrix tells each server itself, or could not measure with.
_OWN = {
    **dict.fromkeys(("--model-path", "--model"), "the MODEL argument"),
    **dict.fromkeys(("--host", "--port", "--api-key", "--log-level"), "the matrix, for each cell"),
    "--served-model-name": "the MODEL argument",
    "--max-running-requests": "--concurrency",
    **dict.fromkeys(("--speculative-draft-model-path", "--draft"), "--domino, --dflash or --mtp"),
    **dict.fromkeys(
        (
            *("--speculative-algorithm", "--speculative-num-steps", "--verify-width"),
            *("--speculative-num-draft-tokens", "--speculative-dflash-block-size"),
        ),
        "--methods",
    ),
}


def matrix(
    context: typer.Context,
    model: options.ModelArgument,
    out: Annotated[
        Path,
        typer.Option(help="Folder of the results; a matrix begun there is gone on with."),
    ],
    workloads: Annotated[
        list[Path],
        typer.Option(
            help="Files of prompts as for `bench serving`, or folders of *.jsonl; their names are "
            "the workloads'. May be given several times."
        ),
    ],
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: target, mtp[-sN], dflash[-bN], domino[-bN], or -auto; N steps "
            "of an MTP head, or N positions verified.",
            show_default="target, s3/s7/s15 and b8/b16 of the drafters given",
        ),
    ] = None,
    domino: Annotated[str | None, typer.Option(help="The Domino drafter.")] = None,
    dflash: Annotated[str | None, typer.Option(help="The DFlash drafter.")] = None,
    mtp: Annotated[
        str | None, typer.Option(help="The MTP head, or own: the one among the target's weights.")
    ] = None,
    concurrency: Annotated[
        str, typer.Option(help="Requests in flight at most, comma-separated.")
    ] = "1,8,32",
    repeats: Annotated[int, typer.Option(help="Fresh-server repeats of every cell.")] = 3,
    num_prompts: Annotated[
        str | None,
        typer.Option(
            help="Most prompts of a cell, drawn by --seed: N, or C=N,… by concurrency.",
            show_default="all, in order",
        ),
    ] = None,
    output_len: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    warmup_requests: Annotated[
        int | None,
        typer.Option(help="Sent before, not counted.", show_default="as many as the concurrency"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws prompts and arrival times.")] = 1,
    request_rate: Annotated[
        float,
        typer.Option(help="Requests a second at Poisson times; inf: as places come free."),
    ] = math.inf,
    temperature: options.Temperature = 0.0,
    no_chat_template: Annotated[
        bool,
        typer.Option("--no-chat-template", help="Ask /v1/completions with the bare prompt."),
    ] = False,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers of exactly --output-len tokens.")
    ] = False,
    save_texts: Annotated[
        bool, typer.Option("--save-texts", help="Keep the answers, not only their digests.")
    ] = False,
    start_timeout: Annotated[
        float, typer.Option(help="Seconds for a server to get ready.")
    ] = 900.0,
    request_timeout: Annotated[float, typer.Option(help="Seconds for one request.")] = 3600.0,
    servers_ahead: Annotated[
        int,
        typer.Option(
            help="Start the servers of a cell and of the next N together; all are ready and idle "
            "before the first is asked, and are stopped after the last. Each gets --mem-fraction-"
            "static 0.75/(N+1) of a GPU, unless --mem-fraction-static or --kv-memory follows --, "
            "which then goes to each as it is."
        ),
    ] = 0,
    share: Annotated[
        str | None,
        typer.Option(
            help="I/N: measure the I-th of N parts only, each with all methods and repeats of its "
            "workloads and concurrencies. The parts may run at once, into one folder, a GPU each.",
            show_default="all cells",
        ),
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Measure cells again that failed before.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cells and what servers are told, and stop.")
    ] = False,
) -> None:
    """Measure methods × workloads × concurrencies × repeats, each cell on a server of its own.

    Finished cells are files in --out: the same command goes on where it stood.

    What follows after a bare -- goes to `knockon serve`, options named --speculative-… only where
    there is a drafter.

    Tables and plots: `knockon bench report`.
    """
    if importlib.util.find_spec("aiohttp") is None:
        raise Refused("aiohttp", "not installed", "pip install aiohttp")
    from knockon.bench.acceptance.methods import Checkpoints
    from knockon.bench.comma_lists import parse_names, parse_numbers
    from knockon.bench.matrix.cells import WHOLE, parse_share, plan
    from knockon.bench.matrix.drafters import choose_methods
    from knockon.bench.matrix.folder import ResultsFolder
    from knockon.bench.matrix.methods import parse_methods
    from knockon.bench.matrix.settings import MatrixSettings, parse_num_prompts
    from knockon.bench.matrix.workloads import find_workloads
    from knockon.models.catalog import resolve

    asked = None if methods is None else parse_methods(parse_names(methods))
    concurrencies = parse_numbers("concurrency", concurrency)
    check_serve_arguments(context.args)
    path = resolve(model).absolute()
    chosen, drafters = choose_methods(path, Checkpoints(mtp, dflash, domino), asked)
    settings = MatrixSettings(
        model=model,
        model_path=str(path),
        drafters=drafters,
        methods=chosen,
        workloads=find_workloads(workloads),
        concurrencies=concurrencies,
        repeats=repeats,
        num_prompts=parse_num_prompts(num_prompts, concurrencies),
        output_len=output_len,
        warmup_requests=warmup_requests,
        seed=seed,
        request_rate=request_rate,
        temperature=temperature,
        chat=not no_chat_template,
        ignore_eos=ignore_eos,
        serve_arguments=tuple(context.args),
        servers_ahead=servers_ahead,
        save_texts=save_texts,
        start_timeout=start_timeout,
        request_timeout=request_timeout,
    )
    folder = ResultsFolder(out)
    part = WHOLE if share is None else parse_share(share)
    cells = part.of(
        plan(settings.methods, settings.workloads, settings.concurrencies, settings.repeats)
    )
    if dry_run:
        list_cells(settings, cells, folder)
        return
    print(json.dumps(folder.merged(settings), indent=1, ensure_ascii=False), file=sys.stderr)
    with sigterm_as_interrupt():
        failed = carry_out(settings, cells, folder, retry_failed, part)
    if failed:
        for cell, error in failed.items():
            print(f"failed: {cell.name}: {error}", file=sys.stderr)
        count = f"{len(failed)} of {len(cells)} cells, kept in {out}/cells"
        print(f"failed: {count}; --retry-failed measures them again", file=sys.stderr)
        raise typer.Exit(1)
    print(f"{len(cells)} of {len(cells)} cells are measured, in {out}/cells", file=sys.stderr)


def carry_out(
    settings: MatrixSettings,
    cells: list[Cell],
    folder: ResultsFolder,
    retry_failed: bool,
    share: Share,
) -> dict[Cell, str]:
    """Run the matrix with a progress bar on stderr; the failed cells and why."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from knockon.bench.matrix.progress import Progress as Told
    from knockon.bench.matrix.run import run_matrix

    log = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=log, transient=True) as progress:
        task = progress.add_task("", total=None)
        name = ""

        def begin(cell: Cell, requests: int) -> None:
            nonlocal name
            name = cell.name
            progress.reset(task, total=requests, description=name)

        told = Told(
            cell=begin,
            doing=lambda text: progress.update(task, description=f"{name}: {text}"),
            ended=lambda: progress.advance(task),
            done=lambda text: progress.console.print(text, markup=False),
        )
        return run_matrix(settings, cells, folder, retry_failed, told, share)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """A SIGTERM ends the matrix as Ctrl-C does: the servers under way are ended first."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def list_cells(settings: MatrixSettings, cells: list[Cell], folder: ResultsFolder) -> None:
    """Print every cell with what has become of it, and each method's server."""
    import shlex

    from knockon.bench.matrix.measure import serve_arguments

    print(json.dumps(folder.merged(settings), indent=1, ensure_ascii=False))
    shown = set()
    for cell in cells:
        if cell.method not in shown:
            shown.add(cell.method)
            print(f"{cell.method}: knockon serve {shlex.join(serve_arguments(settings, cell))}")
    for cell in cells:
        print(f"{cell.name}: {folder.status(cell) or 'to be measured'}")
    counts = [folder.status(cell) for cell in cells]
    print(
        f"{len(cells)} cells: {counts.count('done')} done, {counts.count('failed')} failed, "
        f"{counts.count(None)} to be measured"
    )


def check_serve_arguments(arguments: list[str]) -> None:
    """Find out before the first cell whether ``knockon serve`` takes these.

    Raises:
        Refused: an argument that it does not know, or that the matrix sets itself.
    """
    from knockon.cli.app import app

    for argument in arguments:
        name = argument.partition("=")[0]
        if name in _OWN:
            raise Refused("serve argument", name, f"one that is not set by {_OWN[name]}")
    if arguments and not arguments[0].startswith("--"):
        raise Refused("argument", arguments[0], "options of `knockon serve`, after --")
    group: Any = typer.main.get_command(app)
    # The base of every error of usage, in whichever click typer brings along.
    usage_error: Any = typer.BadParameter.__base__
    try:
        found = group.commands["serve"].make_context("serve", ["--model-path", "m", *arguments])
    except usage_error as error:
        wanted = f"what `knockon serve` takes: {error.format_message()}"
        raise Refused("serve arguments", " ".join(arguments), wanted) from None
    answer_foreign_flags(found.args)
