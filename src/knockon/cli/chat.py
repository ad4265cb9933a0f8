"""``knockon chat``: a conversation in the terminal, streamed."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from knockon.cli import options
from knockon.errors import Refused

_HELP = "/reset starts over, /exit or Ctrl-D leaves, /help shows this; Ctrl-C ends an answer."


def chat(
    model: options.ModelArgument = "smollm2-135m",
    draft: options.Draft = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
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
    max_model_len: options.MaxModelLen = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
) -> None:
    """Talk to a model; each answer ends with its accept length and tokens per second."""
    from knockon.engine.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
    )
    opening = [{"role": "system", "content": system}] if system else []
    history = list(opening)
    terminal = sys.stdin.isatty()
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
    ) as llm:
        if terminal:
            print(f"{model}" + (f" with {draft}" if draft else "") + f". {_HELP}")
        while True:
            try:
                line = input("> " if terminal else "").strip()
            except (EOFError, KeyboardInterrupt):
                break
            if line in ("/exit", "/quit"):
                break
            if line == "/reset":
                history = list(opening)
                continue
            if line.startswith("/"):
                print(_HELP, file=sys.stderr)
                continue
            if not line:
                continue
            history.append({"role": "user", "content": line})
            text, start, count = "", time.perf_counter(), 0
            stream = llm.stream(history, params)
            try:
                for output in stream:
                    print(output.text, end="", flush=True)
                    text += output.text
                    count += len(output.token_ids)
                    if output.finished is not None:
                        accept = output.finished.metrics.mean_accept_length
                        speed = count / (time.perf_counter() - start)
                        print(flush=True)
                        print(
                            f"[{speed:.1f} tok/s, prompt included; accept length {accept:.2f}]",
                            file=sys.stderr,
                        )
            except KeyboardInterrupt:
                print("\n[stopped]", file=sys.stderr)
            except Refused as error:
                # The conversation has outgrown the context, say: the user can start over.
                print(f"error: {error}", file=sys.stderr)
                history.pop()
                continue
            finally:
                stream.close()
            history.append({"role": "assistant", "content": text})
