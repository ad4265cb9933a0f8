"""``knockon generate``: complete one prompt, or a file of them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knockon.cli import options
from knockon.errors import Refused

if TYPE_CHECKING:
    from knockon.engine.metrics import EngineMetrics
    from knockon.engine.request import RequestOutput

_LINE_KEYS = "'prompt' (text), 'messages' (objects) or 'turns' (texts)"


def generate(
    model: options.ModelArgument,
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt. Left out: --file, else standard input."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="Prompts: plain text is one; in .jsonl each line holds 'prompt', 'messages' or "
            "'turns' (whose first is taken)."
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it stands: no chat template.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="One JSON object a prompt, with ids and timings; its 'run' is about all prompts.",
        ),
    ] = False,
    draft: options.Draft = None,
    tp_size: options.TpSize = 1,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    verify_width: options.VerifyWidth = None,
    algorithm: options.Algorithm = None,
    num_steps: options.NumSteps = None,
    pool_size: options.PoolSize = 2048,
    exchange: options.Exchange = "auto",
    draft_head_dtype: options.DraftHeadDtype = "auto",
    linear_attn_backend: options.LinearAttention = "auto",
    max_mamba_cache_size: options.StateCount = None,
    mamba_ssm_dtype: options.StateDtype = "auto",
    cuda_graph_max_bs: options.CudaGraphMaxBs = None,
    max_model_len: options.MaxModelLen = None,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
) -> None:
    """Generate text and print it; speed and accept length go to standard error (or into --json)."""
    from knockon.engine.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        stop=stop or (),
    )
    entries = read_prompts(prompt, file, raw)
    with options.open_llm(
        model,
        draft,
        tp_size,
        dtype,
        device,
        verify_width,
        pool_size,
        exchange,
        draft_head_dtype,
        max_model_len,
        speculative_algorithm=algorithm,
        speculative_num_steps=num_steps,
        linear_attn_backend=linear_attn_backend,
        max_mamba_cache_size=max_mamba_cache_size,
        mamba_ssm_dtype=mamba_ssm_dtype,
        cuda_graph_max_bs=cuda_graph_max_bs,
    ) as llm:
        outputs = llm.generate(entries, params)
        run = llm.metrics()
    for output in outputs:
        if as_json:
            print(json.dumps(as_record(output, run), ensure_ascii=False))
        else:
            print(output.text)
            print(describe(output), file=sys.stderr)


def read_prompts(prompt: str | None, file: Path | None, raw: bool) -> list[Any]:
    """The prompts asked for, as the engine takes them.

    Raises:
        Refused: no prompt, two of them, a file that cannot be read, or a line without a prompt.
    """
    if prompt is not None and file is not None:
        raise Refused("--file", str(file), "either a prompt or --file")
    if file is None:
        return [_wrap(_read_stdin() if prompt is None else prompt, raw)]
    try:
        content = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused("--file", str(file), f"a readable UTF-8 file ({error})") from None
    if file.suffix != ".jsonl":
        return [_wrap(content, raw)]
    # Not splitlines: a JSON string may hold U+2028 as it stands.
    lines = [line for line in content.split("\n") if line.strip()]
    if not lines:
        raise Refused("--file", str(file), "at least one line")
    return [_from_line(line, number, raw) for number, line in enumerate(lines, 1)]


def _from_line(line: str, number: int, raw: bool) -> Any:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # besides bad JSON: numbers and nesting beyond reading
        record = None
    if not isinstance(record, dict):
        raise Refused(f"line {number}", line[:60], "a JSON object")
    messages, turns = record.get("messages"), record.get("turns")
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return messages
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return _wrap(turns[0], raw)
    if isinstance(record.get("prompt"), str):
        return _wrap(record["prompt"], raw)
    raise Refused(f"line {number}", sorted(record), _LINE_KEYS)


def _read_stdin() -> str:
    if sys.stdin.isatty():
        print("The prompt, then Ctrl-D:", file=sys.stderr)
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused("standard input", str(error), "UTF-8 text") from None
    if not text.strip():
        raise Refused("prompt", text, "one as argument, on standard input or by --file")
    return text


def _wrap(text: str, raw: bool) -> Any:
    if not text.strip():
        raise Refused("prompt", text, "text that is not empty")
    return text if raw else [{"role": "user", "content": text}]


def as_record(output: RequestOutput, run: EngineMetrics) -> dict[str, Any]:
    """A result as plain data, and what the engine did for all prompts together."""
    metrics = output.metrics
    return {
        "id": output.id,
        "text": output.text,
        "token_ids": output.token_ids,
        "prompt_tokens": len(output.prompt_token_ids),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "accept_length": round(metrics.mean_accept_length, 3),
        "accept_lengths": metrics.accept_lengths,
        "cached_tokens": metrics.cached_tokens,
        "preemptions": metrics.preemptions,
        "seconds_to_first_token": round(metrics.time_to_first_token, 4),
        "seconds": round(metrics.time_total, 4),
        "run": asdict(run),
    }


def describe(output: RequestOutput) -> str:
    """One line on a result: tokens, speed, accept length, why it ended."""
    metrics = output.metrics
    count = len(output.token_ids)
    decoding = metrics.time_total - metrics.time_to_first_token
    speed = f"{(count - 1) / decoding:.1f} tok/s" if count > 1 and decoding > 0 else "one step"
    return (
        f"[{count} tokens, {speed} after a first token in {metrics.time_to_first_token:.2f} s, "
        f"accept length {metrics.mean_accept_length:.2f}, ended by {output.finish_reason}]"
    )
