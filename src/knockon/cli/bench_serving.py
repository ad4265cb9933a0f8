"""``knockon bench serving``: a dataset's prompts against any OpenAI-compatible server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from knockon.errors import Refused


def serving(
    dataset_path: Annotated[
        Path,
        typer.Option(
            help="ShareGPT's JSON, or JSONL with 'conversations', 'prompt', 'messages' or 'turns'.",
            show_default=False,
        ),
    ],
    base_url: Annotated[
        str, typer.Option(help="Address of the server.")
    ] = "http://127.0.0.1:30000",
    model: Annotated[
        str | None, typer.Option(help="Model to ask for.", show_default="the server's first")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(help="Prompts, drawn at random.", show_default="all, in order")
    ] = None,
    output_len: Annotated[
        int | None,
        typer.Option(
            "--output-len",
            "--sharegpt-output-len",
            help="Tokens to ask for.",
            show_default="each record's output_len",
        ),
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Requests under way at once.", show_default="no bound")
    ] = None,
    request_rate: Annotated[
        float, typer.Option(help="Requests a second at Poisson times; inf sends them at once.")
    ] = float("inf"),
    warmup_requests: Annotated[int, typer.Option(help="Requests sent before, not counted.")] = 1,
    seed: Annotated[int, typer.Option(help="Draws prompts and arrival times.")] = 1,
    apply_chat_template: Annotated[
        bool,
        typer.Option(
            "--apply-chat-template", help="Ask /v1/chat/completions in place of /v1/completions."
        ),
    ] = False,
    flush_cache: Annotated[
        bool, typer.Option("--flush-cache", help="Empty the prefix cache after the warm-up.")
    ] = False,
    disable_ignore_eos: Annotated[
        bool,
        typer.Option(
            "--disable-ignore-eos", help="Let answers end by themselves, at most --output-len."
        ),
    ] = False,
    temperature: Annotated[float, typer.Option(help="Of every request.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Of every request.")] = 1.0,
    api_key: Annotated[
        str | None,
        typer.Option(help="Sent as a bearer token.", envvar=["OPENAI_API_KEY", "KNOCKON_API_KEY"]),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one request.")] = 3600.0,
    output_file: Annotated[
        Path | None, typer.Option("--output-file", "--json", help="Write every number here.")
    ] = None,
    output_details: Annotated[
        bool, typer.Option("--output-details", help="Every request's times and text too.")
    ] = False,
    disable_progress: Annotated[
        bool, typer.Option("--disable-progress", "--disable-tqdm", help="No progress bar.")
    ] = False,
) -> None:
    """Measure a server: tokens a second, E2E, TTFT, TPOT, inter-token latency, accept length.

    ITL is the time between two events of a stream. A speculating server puts the tokens of a whole
    step into one; TPOT counts tokens.
    """
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        raise Refused("aiohttp", "not installed", "pip install aiohttp") from None
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from knockon.bench.serving.dataset import draw, read_dataset
    from knockon.bench.serving.run import measure
    from knockon.bench.serving.settings import ServingSettings
    from knockon.bench.serving.table import print_table
    from knockon.cli.result_files import check_result_files, write_result

    settings = ServingSettings(
        base_url=base_url,
        dataset=dataset_path,
        model=model,
        num_prompts=num_prompts,
        output_len=output_len,
        max_concurrency=max_concurrency,
        request_rate=request_rate,
        warmup_requests=warmup_requests,
        seed=seed,
        chat=apply_chat_template,
        flush_cache=flush_cache,
        ignore_eos=not disable_ignore_eos,
        temperature=temperature,
        top_p=top_p,
        api_key=api_key,
        timeout=timeout,
    )
    check_result_files(output_file, None)
    total = len(draw(read_dataset(dataset_path), num_prompts, seed))
    log = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=log, transient=True, disable=disable_progress
    ) as progress:
        task = progress.add_task("", total=total)
        report = measure(
            settings,
            doing=lambda text: progress.update(task, description=text),
            ended=lambda: progress.advance(task),
        )
    print_table(report, Console(highlight=False, width=None if sys.stdout.isatty() else 100))
    write_result(report.to_json(output_details), output_file, None, lambda path: None)
