"""Mixed traffic through the engine, then: are all answers right, and is everything given back?

    python benchmarks/engine_soak.py [--seconds 300] [--prompts workloads.jsonl]

Prompts of 1 to 1500 tokens, greedy, sampled, penalised, with stop strings and log-probabilities,
some sharing prefixes, some aborted, in memory that does not suffice, so that requests are
preempted. Afterwards a sample of the greedy answers is held to a slow reference: the target alone,
one step at a time, with PyTorch's attention and without graphs. The result goes to
``engine_soak_<dtype>.json`` in ``--out``; the exit status is 1 where a check failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from knockon.bench.environment import environment
from knockon.bench.loaded import LoadedModels
from knockon.bench.soak.checks import check_answers, check_idle, check_memory, compare, plain
from knockon.bench.soak.run import Soak
from knockon.bench.soak.traffic import Traffic
from knockon.cli.generate import read_prompts
from knockon.engine.assemble import build_engine
from knockon.engine.config import EngineConfig
from knockon.engine.prompts import encode_prompt
from knockon.engine.settle import check
from knockon.engine.width import AUTO, FixedWidth
from knockon.parallel import SingleRank

RESULTS = Path(__file__).parent / "results"


def token_stream(tokenizer: Any, prompts: Path | None, vocab_size: int, seed: int) -> list[int]:
    """Token ids that prompts are cut from: the texts given, or ids at random."""
    if prompts is None:
        rng = random.Random(f"{seed} stream")
        return [rng.randrange(vocab_size) for _ in range(50_000)]
    chats = read_prompts(None, prompts, raw=False)
    return [token for chat in chats for token in encode_prompt(tokenizer, chat)]


def soak(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Everything that is reported, as plain data."""
    config = EngineConfig(
        args.model,
        draft=args.draft,
        dtype=args.dtype,
        device=args.device,
        verify_width=int(args.verify_width) if args.verify_width.isdigit() else args.verify_width,
        max_model_len=args.longest_prompt + args.longest_output,
        max_batch_size=args.max_batch_size,
        kv_memory=args.kv_memory << 20,
        overlap_schedule=args.overlap,
    )
    engine = build_engine(check(config), SingleRank())
    vocab_size = engine.runner.target.config.vocab_size
    stream = token_stream(engine.tokenizer, args.prompts, vocab_size, args.seed)
    traffic = Traffic(stream, args.longest_prompt, args.longest_output, args.seed)

    def tell(seconds: float, text: str) -> None:
        if int(seconds) % 20 == 0 and seconds % 1 < 0.5:
            console.print(f"{seconds:.0f} s: {text}")

    run = Soak(engine, traffic, args.sample, args.seed, tell).run(args.seconds, args.requests)
    checks = [*check_idle(engine, run), check_memory(run, args.seconds)]
    metrics = engine.metrics()
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    console.print(f"asking the reference {len(run.samples)} of them again")
    slow = LoadedModels(
        EngineConfig(
            args.model,
            dtype=args.dtype,
            device=args.device,
            max_model_len=args.longest_prompt + args.longest_output,
            max_batch_size=args.reference_batch,
            kv_memory=1 << 30,
            attention_backend="torch",
            overlap_schedule=False,
            cuda_graph=False,
            prefix_cache=False,
        )
    )
    reference = slow.engine(slow.runner(None, (1,)), FixedWidth(1))
    differences = compare(run.samples, reference, args.reference_batch)
    dtype = slow.config.dtype
    checks.append(check_answers(differences, len(run.samples), dtype))
    for each in checks:
        outcome = {True: "ok", False: "FAILED", None: "not judged"}[each.passed]
        console.print(f"{outcome}: {each.name} ({each.found})")
    return {
        "what": "mixed traffic through the engine, checked afterwards",
        "environment": environment(),
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "dtype": dtype,
        "passed": all(each.passed is not False for each in checks),
        "checks": [asdict(each) for each in checks],
        "differences": [plain(difference) for difference in differences],
        "compared": len(run.samples),
        "seconds": round(run.seconds, 1),
        "requests": sum(run.sent.values()),
        "sent": dict(run.sent),
        "finish_reasons": dict(run.reasons),
        "output_tokens": run.tokens,
        "prompt_tokens": run.prompt_tokens,
        "cached_tokens": run.cached_tokens,
        "preemptions": run.preemptions,
        "steps": run.steps,
        "longest_step_seconds": round(run.longest_step, 3),
        "drained_in_seconds": round(run.ended_in, 3),
        "steps_by_width": metrics.widths,
        "mean_accept_length": round(metrics.mean_accept_length, 3),
        "memory": [(round(when, 1), taken) for when, taken in run.memory],
    }


def main(arguments: list[str] | None = None) -> None:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=formatter)
    add = parser.add_argument
    add("--seconds", type=float, default=300, help="of traffic; it then ends, and is checked")
    add("--requests", type=int, default=0, help="least number sent, even if it takes longer")
    add("--model", default="smollm2-135m", help="catalogue name or path")
    add("--draft", default="smollm2-135m-domino", help="its drafter")
    add("--dtype", default="float32", help="answers are judged in float32, reported in others")
    add("--device", default="auto")
    add("--verify-width", default=AUTO)
    add("--prompts", type=Path, default=None, help="JSON lines to cut prompts from; else random")
    add("--longest-prompt", type=int, default=1500, help="tokens")
    add("--longest-output", type=int, default=400, help="tokens")
    add("--max-batch-size", type=int, default=32)
    add("--kv-memory", type=int, default=256, help="MiB; little, so that requests are preempted")
    add("--sample", type=int, default=64, help="answers that are compared")
    add("--reference-batch", type=int, default=16, help="requests the reference answers at a time")
    add("--seed", type=int, default=0)
    add("--overlap", action="store_true", default=None, help="launch ahead on a CPU too")
    add("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    args = parser.parse_args(arguments)
    result = soak(args, Console(highlight=False))
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out / f"engine_soak_{result['dtype']}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{result['requests']} requests, {result['output_tokens']} tokens "
        f"in {result['seconds']} s, {result['preemptions']} preemptions, "
        f"{result['cached_tokens']} cached tokens; {out}"
    )
    if not result["passed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
