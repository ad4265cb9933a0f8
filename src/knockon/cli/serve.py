"""``knockon serve``: the OpenAI-compatible server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from knockon.cli import options
from knockon.cli.flag_names import named_by_flags
from knockon.cli.foreign_flags import answer_foreign_flags, own_backend
from knockon.errors import Refused

ALGORITHMS = ("DFLASH", "MTP", "NONE")


def serve(
    context: typer.Context,
    model_path: Annotated[
        str,
        typer.Option(
            "--model-path",
            "--model",
            help="Catalogue name, Hugging Face folder, GGUF file or hub id.",
            show_default=False,
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 30000,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="What clients call the model.", show_default="the model path as given"),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Asked for as a bearer token.", envvar="KNOCKON_API_KEY"),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            help="File with a Jinja chat template, or the template.", show_default="the model's"
        ),
    ] = None,
    tp_size: options.TpSize = 1,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    context_length: Annotated[
        int | None,
        typer.Option(help="Positions a request may reach.", show_default="the model's own limit"),
    ] = None,
    max_running_requests: Annotated[
        int | None,
        typer.Option(help="Sequences computed at once.", show_default="32 on CPUs, 64 on GPUs"),
    ] = None,
    max_queued_requests: Annotated[
        int, typer.Option(help="Sequences that may wait beside those; beyond, 429.")
    ] = 256,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request body; beyond, 413.")] = (
        4 << 20
    ),
    mem_fraction_static: Annotated[
        float,
        typer.Option(help="On GPUs, part of the whole memory for own weights and KV together."),
    ] = 0.88,
    kv_memory: Annotated[
        int | None,
        typer.Option(help="Bytes of KV, over all ranks.", show_default="512 MiB on CPUs"),
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="auto, or fp8_e4m3: half the KV memory, rounded.")
    ] = "auto",
    page_size: Annotated[int, typer.Option(help="Positions a KV page.")] = 16,
    chunked_prefill_size: Annotated[
        int | None,
        typer.Option(help="Prompt tokens run in one step.", show_default="512 on CPUs, 4096"),
    ] = None,
    disable_radix_cache: Annotated[
        bool, typer.Option("--disable-radix-cache", help="Do not use KV of earlier prompts again.")
    ] = False,
    max_mamba_cache_size: options.StateCount = None,
    mamba_ssm_dtype: options.StateDtype = "auto",
    attention_backend: Annotated[
        str, typer.Option(help="auto, torch or triton. Other servers' names: answered, then auto.")
    ] = "auto",
    linear_attn_backend: options.LinearAttention = "auto",
    disable_cuda_graph: Annotated[
        bool, typer.Option("--disable-cuda-graph", help="Launch every step's kernels one by one.")
    ] = False,
    cuda_graph_max_bs: options.CudaGraphMaxBs = None,
    random_seed: Annotated[
        int | None,
        typer.Option(
            help="Seeds requests that bring no seed, by order.", show_default="fresh seeds"
        ),
    ] = None,
    speculative_algorithm: Annotated[
        str | None,
        typer.Option(
            help="DFLASH (Domino heads too, by the drafter's own config), MTP (without a drafter: "
            "the target's own head) or NONE.",
            show_default="what the drafter is",
        ),
    ] = None,
    speculative_draft_model_path: Annotated[
        str | None,
        typer.Option("--speculative-draft-model-path", "--draft", help="The drafter."),
    ] = None,
    verify_width: options.VerifyWidth = None,
    num_steps: options.NumSteps = None,
    pool_size: options.PoolSize = 2048,
    exchange: options.Exchange = "auto",
    draft_head_dtype: options.DraftHeadDtype = "auto",
    watchdog_timeout: Annotated[
        float, typer.Option(help="Seconds of silence after which the engine counts as hung.")
    ] = 300.0,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that answers under way get after SIGTERM.")
    ] = 600.0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API, with a page to chat at /.

    The engine runs in a process of its own. The first SIGTERM or Ctrl-C lets the answers under way
    finish; a second one stops at once.
    """
    from knockon.engine.config import EngineConfig
    from knockon.server.run import EngineFailed, serve
    from knockon.server.settings import ServerSettings

    notes = answer_foreign_flags(context.args)
    attention_notes, attention_backend = own_backend("--attention-backend", attention_backend)
    linear_notes, linear_attn_backend = own_backend("--linear-attn-backend", linear_attn_backend)
    draft = choose_draft(speculative_algorithm, speculative_draft_model_path)
    algorithm = None if speculative_algorithm is None else speculative_algorithm.upper()
    # Without NONE, a width where nothing is drafted is a drafter forgotten: refused below.
    drafts = algorithm != "NONE"
    width = options.parse_width(verify_width)
    with named_by_flags():
        config = EngineConfig(
            model=model_path,
            draft=draft,
            tp_size=tp_size,
            dtype=dtype,
            device=device,
            verify_width=width if drafts else None,
            speculative_algorithm=algorithm,
            speculative_num_steps=num_steps if drafts else None,
            speculative_domino_candidate_pool_size=pool_size,
            speculative_domino_exchange=exchange,
            speculative_draft_head_dtype=draft_head_dtype,
            max_model_len=context_length,
            max_batch_size=max_running_requests,
            kv_cache_dtype=kv_cache_dtype,
            page_size=page_size,
            kv_memory=kv_memory,
            mem_fraction_static=mem_fraction_static,
            prefill_chunk=chunked_prefill_size,
            prefix_cache=not disable_radix_cache,
            max_mamba_cache_size=max_mamba_cache_size,
            mamba_ssm_dtype=mamba_ssm_dtype,
            attention_backend=attention_backend,
            linear_attn_backend=linear_attn_backend,
            cuda_graph=not disable_cuda_graph,
            cuda_graph_max_bs=cuda_graph_max_bs,
        )
        settings = ServerSettings(
            engine=vars(config),
            host=host,
            port=port,
            served_model_name=served_model_name,
            api_key=api_key,
            chat_template=read_chat_template(chat_template),
            max_queued_requests=max_queued_requests,
            max_body_bytes=max_body_bytes,
            random_seed=random_seed,
            watchdog_timeout=watchdog_timeout,
            drain_timeout=drain_timeout,
            log_level=log_level,
        )
        for note in (*notes, *attention_notes, *linear_notes):
            print(f"note: {note}", file=sys.stderr)
        try:
            serve(settings)
        except EngineFailed as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from None


def choose_draft(algorithm: str | None, draft: str | None) -> str | None:
    """The drafter to load, if any.

    Raises:
        Refused: an algorithm that is not there, or one and a drafter that do not fit.
    """
    field = "--speculative-algorithm"
    if algorithm is None:
        return draft
    name = algorithm.upper()
    if name not in ALGORITHMS:
        raise Refused(field, algorithm, f"one of {', '.join(ALGORITHMS)}")
    if name == "NONE":
        return None
    # An MTP head may also lie among the target's own weights.
    if draft is None and name != "MTP":
        raise Refused(
            "--speculative-draft-model-path", None, "the drafter that --speculative-algorithm needs"
        )
    return draft


def read_chat_template(given: str | None) -> str | None:
    """A template's source, from a file where one of that name is there.

    Raises:
        Refused: neither a template nor a file that can be read.
    """
    if given is None:
        return None
    field = "--chat-template"
    source = given
    if "{" not in given:
        try:
            source = Path(given).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise Refused(field, given, f"a readable UTF-8 file ({error})") from None
    return source
