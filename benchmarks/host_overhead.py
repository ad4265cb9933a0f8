"""What the host does in an engine step, with a runner that computes nothing.

    python benchmarks/host_overhead.py --out host_overhead.json [--batches 1 512] [--profile]

``LLM.generate``, the engine, its scheduler and the host's part of ``PipelinedRunner`` are the real
ones; in the place of every forward stands a constant. Times are CPU seconds of this process, so
other work on the machine disturbs them little: they say how long a GPU would have to run for the
host to keep up with it, and nothing of the time that PyTorch takes to launch a graph.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from knockon.engine.engine import Engine
from knockon.engine.flight import PipelinedFlight
from knockon.engine.graphs import StepKey
from knockon.engine.llm import LLM
from knockon.engine.pipelined import PipelinedRunner
from knockon.engine.prefill_batch import PrefillRows
from knockon.engine.request import Request
from knockon.engine.sampling import DrawKind
from knockon.engine.sampling_params import SamplingParams
from knockon.engine.step import Step
from knockon.engine.width import FixedWidth
from knockon.models.catalog import resolve
from knockon.models.tokenizer import load_tokenizer
from knockon.parallel import SingleRank

PAGE_SIZE = 16
PROMPT = 64
VOCABULARY = 49152


class NoForward(PipelinedRunner):
    """Gains ``gained`` tokens a request a step from nowhere.

    Attributes:
        launches: for every step, the requests that decode and the CPU time at its launch.
    """

    def __init__(self, max_batch_size: int, max_positions: int, gained: int, block: int) -> None:
        config = SimpleNamespace(vocab_size=VOCABULARY, eos_token_ids=(0,))
        target: Any = SimpleNamespace(
            device=torch.device("cpu"),
            config=config,
            attention=SimpleNamespace(reads_lengths=True),
            group=SingleRank(),
        )
        drafter: Any = None
        if block > 1:
            drafter = SimpleNamespace(block_size=block, exchange_for=lambda batch, steps: None)
        super().__init__(
            target, drafter, PAGE_SIZE, max_batch_size, max_positions, (max_batch_size,)
        )
        self.gained = gained
        self.launches: list[tuple[int, float]] = []

    def launch(self, step: Step, width: int) -> PipelinedFlight:
        self.launches.append((0 if step.prefill else len(step.decode), time.process_time()))
        return super().launch(step, width)

    def _graph(self, key: StepKey) -> Any:
        tokens = torch.arange(1000, 1000 + key.bucket * key.width).view(key.bucket, key.width)
        packed = torch.cat([tokens, torch.full((key.bucket, 1), self.gained)], dim=1)
        return SimpleNamespace(replay=lambda: packed)

    def _run_rows(
        self,
        where: PrefillRows,
        tokens: Tensor,
        ragged: bool = False,
        revisits: bool = False,
        keeps: bool = False,
        cut: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        return where.slots, where.starts + where.counts

    def _first_tokens(
        self,
        hidden: Tensor,
        ends: Tensor,
        slots: Tensor,
        kind: DrawKind | None,
        requests: Sequence[Request] = (),
    ) -> tuple[Tensor, Tensor]:
        return torch.full_like(slots, 1000), slots


def run(
    batch: int, width: int, gained: int, steps: int, tokenizer: Any, profile: bool = False
) -> dict[str, Any]:
    """``batch`` requests that all run for ``steps`` steps."""
    max_tokens = 1 + gained * steps
    positions = PROMPT + max_tokens + 3 * width
    runner = NoForward(batch, positions, gained, width)
    engine = Engine(
        runner,
        tokenizer,
        num_pages=batch * (positions // PAGE_SIZE + 3) + 1,
        max_batch_size=batch,
        prefill_chunk=16384,
        max_length=positions,
        widths=FixedWidth(width),
    )
    prompts = torch.randint(
        1000, VOCABULARY, (batch, PROMPT), generator=torch.Generator().manual_seed(0)
    ).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    with (
        patch("knockon.engine.llm.check", lambda config: config),
        patch("knockon.engine.llm.build_engine", lambda config, group: engine),
    ):
        llm = LLM("no model")
    profiler = cProfile.Profile()
    began = time.process_time()
    if profile:
        profiler.enable()
    outputs = llm.generate(prompts, params)
    profiler.disable()
    total = time.process_time() - began
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
    tokens = sum(len(output.token_ids) for output in outputs)
    between = [
        after - before
        for (decoding, before), (others, after) in zip(
            runner.launches, runner.launches[1:], strict=False
        )
        if decoding == others == batch
    ]
    return {
        "batch": batch,
        "verify_width": width,
        "gained": gained,
        "steps": len(between),
        "step_ms": 1e3 * fmean(between),
        "median_step_ms": 1e3 * median(between),
        "us_per_request_step": 1e6 * fmean(between) / batch,
        "tokens": tokens,
        "seconds": total,
        "tokens_per_cpu_second": tokens / total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 512, 1024])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--gained", type=int, default=6, help="tokens a step at width 16")
    parser.add_argument("--tokenizer", default="smollm2-135m", help="model whose tokenizer decodes")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(resolve(args.tokenizer))
    rows = []
    for width, gained in ((1, 1), (16, args.gained)):
        for batch in args.batches:
            row = run(batch, width, gained, args.steps, tokenizer, args.profile)
            rows.append(row)
            print(
                f"batch {batch:5d}  width {width:2d}: {row['step_ms']:7.3f} ms a step, "
                f"{row['us_per_request_step']:6.2f} us a request; all in all "
                f"{row['tokens_per_cpu_second']:9.0f} tokens a CPU second",
                flush=True,
            )
    if args.out is not None:
        report = {
            "what": "host work of an engine step, no forward computed; CPU time of the process",
            "device": "cpu",
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "rows": rows,
        }
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
