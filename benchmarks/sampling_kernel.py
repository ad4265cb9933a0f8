"""The drawing kernels on one GPU beside their plain twin, and the argmax of a greedy step.

    python benchmarks/sampling_kernel.py --json sampling_kernel.json

BF16 logits. Every kind of draw is checked before it is timed: where the kernels draw another token
than the twin, the two tokens' scores must tie to within rounding. A time is the median of 5
rounds of CUDA-graph replays. ``widened_us`` is the kernels as the engine's graphs hold them, told
only which filters are on (``DrawKind.widened``). ``bytes_us`` is what reading the logits twice
takes at 4.1 TB/s.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from knockon.bench.needs_gpu import needed_gpu
from knockon.bench.replay import replay_us
from knockon.engine.filters import temper
from knockon.engine.fused.draw import DrawLaunch, draw_kernel, draw_launch
from knockon.engine.noise import exponential, row_keys
from knockon.engine.sampling import DrawKind, SamplingBatch, SamplingRequest, draw_plain
from knockon.engine.sampling_params import SamplingParams
from knockon.rollout import order

BYTES_PER_US = 4.1e6
# Scores of two tokens that tie: FP32 sums and logarithms of numbers up to about 40.
TIE = 2e-5


class Shape(NamedTuple):
    """Logits ``[requests, rows, vocab]``."""

    name: str
    requests: int
    rows: int
    vocab: int


SHAPES = [
    Shape("SmolLM2, 512 at once", 512, 1, 49152),
    Shape("SmolLM2, 1024 at once", 1024, 1, 49152),
    Shape("8B, one", 1, 1, 151936),
    Shape("8B, verify", 1, 16, 151936),
    Shape("8B, 32 verified", 32, 16, 151936),
]
KINDS: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature 0.6": {"temperature": 0.6},
    "min-p": {"min_p": 0.05},
    "top-k": {"top_k": 50},
    "top-p": {"top_p": 0.95},
    "top-k, top-p": {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
}


def make_inputs(shape: Shape) -> tuple[Tensor, Tensor]:
    """Logits that concentrate as a model's do, and positions."""
    size = (shape.requests, shape.rows, shape.vocab)
    logits = torch.randn(size, device="cuda").mul_(2.5).to(torch.bfloat16)
    starts = torch.randint(0, 4096, (shape.requests, 1), device="cuda")
    return logits, starts + torch.arange(shape.rows, device="cuda")


def batch_of(shape: Shape, kind: dict[str, Any]) -> SamplingBatch:
    requests = [SamplingRequest(SamplingParams(**kind), 77 * b) for b in range(shape.requests)]
    return SamplingBatch.build(requests, shape.vocab, "cuda")


def widened(batch: SamplingBatch) -> SamplingBatch:
    """As a graph holds it."""
    kind = DrawKind(*(getattr(batch, name) for name in DrawKind._fields)).widened()
    return dataclasses.replace(batch, **kind._asdict())


def differing(logits: Tensor, positions: Tensor, batch: SamplingBatch, kind: str) -> int:
    """Rows drawn otherwise than by the twin; all of them ties."""
    got, wanted = draw_kernel(logits, positions, batch), draw_plain(logits, positions, batch)
    requests, rows = (got != wanted).nonzero(as_tuple=True)
    if len(requests):
        keys = row_keys(batch.seed[requests], positions[requests, rows])
        noise = exponential(keys, logits.shape[-1]).log()
        scores = temper(logits[requests, rows].float(), batch.temperature[requests]) - noise
        one, other = (scores.gather(1, x[requests, rows][:, None]) for x in (got, wanted))
        gap = (one - other).abs().max().item()
        # At a nucleus's edge a token may be in or out, whatever its score.
        if not gap <= TIE and not batch.any_top_p:
            raise SystemExit(f"wrong draws: {kind}, {len(requests)} rows, scores {gap} apart")
    return len(requests)


def variants(launch: DrawLaunch, rows: int, vocab: int) -> list[DrawLaunch]:
    """Settings near the chosen ones."""
    found = []
    for tile, warps, share in ((1024, 4, 2), (2048, 4, 1), (2048, 8, 1), (512, 4, 1), (1024, 8, 1)):
        of_row = -(-vocab // tile)
        programs = max(1, min(of_row, 4096 // share // rows))
        tiles = -(-of_row // programs)
        found.append(DrawLaunch(tile, tiles, -(-of_row // tiles), warps))
    return [which for which in found if which != launch]


def time_shape(shape: Shape, seconds: float) -> list[dict[str, Any]]:
    logits, positions = make_inputs(shape)
    count = shape.requests * shape.rows
    greedy = replay_us([lambda: order.argmax(logits)], seconds=seconds)
    results = []
    for kind, settings in KINDS.items():
        batch = batch_of(shape, settings)
        in_graph = widened(batch)
        unlike = differing(logits, positions, batch, kind)
        result: dict[str, Any] = shape._asdict() | {
            "kind": kind,
            "rows_differing": unlike,
            "kernel_us": replay_us(
                [lambda batch=batch: draw_kernel(logits, positions, batch)], seconds=seconds
            ),
            "widened_us": replay_us(
                [lambda batch=in_graph: draw_kernel(logits, positions, batch)], seconds=seconds
            ),
            "plain_us": replay_us(
                [lambda batch=batch: draw_plain(logits, positions, batch)], seconds=seconds
            ),
            "argmax_us": greedy,
            "bytes_us": 2 * logits.numel() * logits.element_size() / BYTES_PER_US,
        }
        if kind == "temperature 1" and count >= 512:
            result["variants"] = [
                which.__dict__
                | {
                    "kernel_us": replay_us(
                        [lambda which=which: draw_kernel(logits, positions, batch, which)],  # noqa: B023
                        seconds=seconds,
                    )
                }
                for which in variants(draw_launch(count, shape.vocab), count, shape.vocab)
            ]
        results.append(result)
        columns = ("kernel_us", "widened_us", "plain_us", "argmax_us", "bytes_us")
        cells = "".join(f"{result[name]:>11.1f}" for name in columns)
        print(f"{shape.name:>22} {kind:>16}{unlike:>9}{cells}", flush=True)
        for tried in result.get("variants", ()):
            print(f"{'':>39}{tuple(tried.values())}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--seconds", type=float, default=0.02, help="of a round")
    args = parser.parse_args()
    needed_gpu()
    torch.manual_seed(0)
    begun = time.monotonic()
    print(
        f"{'microseconds':>39}{'differ':>9}{'kernel':>11}{'widened':>11}{'plain':>11}"
        f"{'argmax':>11}{'bytes':>11}"
    )
    results = [found for shape in SHAPES for found in time_shape(shape, args.seconds)]
    print(f"{time.monotonic() - begun:.0f} s")
    record = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "dtype": "bfloat16",
        "results": results,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
