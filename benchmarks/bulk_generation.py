"""Offline bulk generation by a small target alone, as training data needs it, in tokens a second.

    python benchmarks/bulk_generation.py [--text corpus.txt] [--batch 512 1024]
    python benchmarks/bulk_generation.py --random smollm2-135m

Prompts of 64 tokens, 256 new ones each, greedy and sampled at temperature 1, twice as many requests
as are computed at once. The engine is the one that serves, text and all; with ``--random`` its
weights are random and no text is decoded. A step's time on the device beside its time on the wall
says for how much of it the GPU waits for the host. The result goes to ``bulk_generation.json`` in
``--out``.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from knockon.bench.engine.assemble import assemble_engine, choose_backend
from knockon.bench.engine.load import serve, synchronise
from knockon.bench.engine.shapes import find_shape
from knockon.bench.engine.weights import random_target
from knockon.bench.environment import environment
from knockon.bench.width_trace import TracedWidth
from knockon.engine.assemble import build_engine
from knockon.engine.build_runner import this_device
from knockon.engine.config import EngineConfig
from knockon.engine.engine import Engine
from knockon.engine.pipelined import PipelinedRunner
from knockon.engine.settle import check, settle
from knockon.models.target import POSITION_SLACK
from knockon.parallel import SingleRank

RESULTS = Path(__file__).parent / "results"
WARM_UP_TOKENS = 8
KINDS = {"greedy": 0.0, "sampled": 1.0}  # temperatures


def make_engine(args: argparse.Namespace, batch: int) -> Engine:
    """An engine with KV for ``batch`` whole requests."""
    length = args.input_len + args.output_len
    if args.random is None:
        config = EngineConfig(
            args.model,
            dtype=args.dtype,
            device=args.device,
            max_model_len=length,
            max_batch_size=batch,
            kv_memory=args.kv_memory << 20 if args.kv_memory else None,
            prefill_chunk=args.prefill_chunk,
            prefix_cache=args.prefix_cache,
        )
        return build_engine(check(config), SingleRank())
    found = settle(EngineConfig("random", dtype=args.dtype, device=args.device))
    target = random_target(
        find_shape(args.random).target,
        getattr(torch, found.dtype),
        this_device(found.device, SingleRank()),
        length + 2 * POSITION_SLACK,
        args.seed,
    )
    target.attention = choose_backend(found.device, found.dtype)
    return assemble_engine(
        target, None, None, verify_width=1, max_batch_size=batch, max_length=length
    )


def make_prompts(
    args: argparse.Namespace, engine: Engine, count: int, salt: str
) -> list[list[int]]:
    """Windows of the text's tokens, or tokens at random."""
    rng = random.Random(f"{args.seed} {salt}")
    length, vocab_size = args.input_len, engine.runner.target.config.vocab_size
    if args.text is None:
        return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
    ids = list(engine.tokenizer.encode(args.text.read_text("utf-8")))
    if len(ids) < 2 * length:
        raise SystemExit(f"--text: {len(ids)} tokens, wanted at least {2 * length}")
    starts = [rng.randrange(len(ids) - length) for _ in range(count)]
    return [ids[start : start + length] for start in starts]


def measure(args: argparse.Namespace, engine: Engine, batch: int, kind: str) -> dict[str, Any]:
    """Warm up (graphs of that kind are captured), then measure."""
    device = engine.runner.target.device
    temperature = KINDS[kind]

    def run(count: int, output_len: int, salt: str) -> Any:
        prompts = make_prompts(args, engine, count, salt)
        seeds = [args.seed + number for number in range(count)]
        return serve(engine, batch, prompts, seeds, output_len, temperature=temperature)

    run(batch, min(WARM_UP_TOKENS, args.output_len), f"{kind} warm-up")
    traced = engine.widths = TracedWidth(engine.widths)
    synchronise(engine)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    found = run(args.rounds * batch, args.output_len, kind)
    engine.widths = traced.policy
    full = [step.seconds for step in traced.steps if step.batch == batch]
    on_device = sum(step.seconds for step in traced.steps)
    step_ms = fmean(full) * 1e3 if full else None
    wall_ms = found.full_step * 1e3 if found.full_step is not None else None
    waits = None
    if device.type == "cuda" and step_ms is not None and wall_ms is not None:
        waits = max(0.0, 1 - step_ms / wall_ms)
    graphs = engine.runner.graphs if isinstance(engine.runner, PipelinedRunner) else None
    return {
        "batch": batch,
        "kind": kind,
        "requests": args.rounds * batch,
        "output_tokens": found.tokens,
        "seconds": round(found.seconds, 4),
        "tokens_per_second": round(found.tokens_per_second, 1),
        "step_ms_on_device": _rounded(step_ms),
        "step_ms_on_the_wall": _rounded(wall_ms),
        "gpu_waits": _rounded(waits),
        "full_steps": found.full_steps,
        # What is left beside it is prefill, and waiting.
        "decode_share_of_all_time": round(on_device / found.seconds, 4),
        "time_to_first_token_ms": round(found.time_to_first_token * 1e3, 2),
        "peak_memory_bytes": (
            torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        ),
        "graphs": 0 if graphs is None else graphs.count,
        "capture_seconds": 0.0 if graphs is None else round(graphs.seconds, 2),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def show(rows: list[dict[str, Any]], title: str, console: Console) -> None:
    """A row a batch size and kind."""
    table = Table(title=title, title_justify="left")
    for heading in ("batch", "kind"):
        table.add_column(heading)
    for heading in ("tok/s", "step ms", "on the wall", "GPU waits", "peak GiB", "graphs"):
        table.add_column(heading, justify="right")

    def text(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    for row in rows:
        memory = row["peak_memory_bytes"]
        table.add_row(
            str(row["batch"]),
            row["kind"],
            f"{row['tokens_per_second']:.0f}",
            text(row["step_ms_on_device"], ".3f"),
            text(row["step_ms_on_the_wall"], ".3f"),
            text(row["gpu_waits"], ".1%"),
            text(None if memory is None else memory / 2**30, ".1f"),
            f"{row['graphs']} in {row['capture_seconds']:.1f} s",
        )
    console.print(table)


def main() -> None:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=formatter)
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="catalogue name or path")
    add("--random", metavar="SHAPE", default=None, help="random weights of a shape instead")
    add("--batch", type=int, nargs="+", default=[512, 1024], help="requests computed at once")
    add("--rounds", type=int, default=2, help="requests, in multiples of the batch")
    add("--input-len", type=int, default=64)
    add("--output-len", type=int, default=256)
    add("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    add("--text", type=Path, default=None, help="prompts are windows of it; else random tokens")
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--kv-memory", type=int, default=None, help="MiB; by default what the device has")
    add("--prefill-chunk", type=int, default=None, help="prompt tokens of a step")
    add(
        "--prefix-cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep pages for later prompts, as a server does",
    )
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    args = parser.parse_args()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    rows = []
    device, dtype = "", ""
    for batch in args.batch:
        engine = make_engine(args, batch)
        target = engine.runner.target
        cuda = target.device.type == "cuda"
        device = torch.cuda.get_device_name(target.device) if cuda else "CPU"
        dtype = str(target.dtype).removeprefix("torch.")
        for kind in args.kinds:
            rows.append(measure(args, engine, batch, kind))
            console.print(f"batch {batch}, {kind}: {rows[-1]['tokens_per_second']:.0f} tok/s")
        del engine, target
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    what = args.model if args.random is None else f"{args.random} (random weights)"
    title = (
        f"Bulk generation, {what}, {dtype}, {device}: {args.input_len} tokens in, "
        f"{args.output_len} out, prefill included"
    )
    show(rows, title, console)
    result = {
        "what": title,
        "environment": environment(),
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "rows": rows,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out / "bulk_generation.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"written to {out}")


if __name__ == "__main__":
    main()
