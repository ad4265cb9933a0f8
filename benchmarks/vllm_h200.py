"""Domino inside vLLM on a GPU, beside vLLM's own target-only and DFlash, and beside Knockon.

    python benchmarks/vllm_h200.py FOLDER [--prompts FILE.jsonl] [--dflash DRAFTER] [--parts …]
    python benchmarks/vllm_h200.py FOLDER --merge FOLDER_A FOLDER_B

- agreement: eager runs record every block that the rollout is handed; a rollout made by hand from
  the checkpoints' files must give the same chains, by PyTorch and by the kernels.
- lossless: greedy answers of Domino in CUDA graphs (and run eagerly, where agreement is asked for
  too) against vLLM's target alone; where one first differs, the target's own margin between the
  two tokens says how near a tie it was.
- knockon: the accept length of Knockon's engine on the same prompts.
- speed: output tokens a second at concurrency 1 and 8: target, DFlash (with ``--dflash``), Domino.
- step: Qwen3-8B's sizes, random weights, vLLM's synthetic acceptance: milliseconds of a step with
  a DFlash and with a Domino drafter at concurrency 1, 8 and 32.

It needs one of the vLLM versions that the plugin supports, and Knockon found beside it. An engine
takes long to start, so each does all that the parts ask of it: four for agreement, lossless and
speed, two for step. Parts can be run on different GPUs at a time (``CUDA_VISIBLE_DEVICES``), each
into a folder of its own, or one after the other; ``--merge`` puts their results together.

The result is in ``vllm.json`` in FOLDER after every engine; one that fails is named there and the
others go on. The exit status is 1 where one failed, or a chain or an answer is another and no near
tie says why.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm_parts import Bench, read_prompts

from knockon.bench.environment import environment
from knockon.bench.export_folder import export
from knockon.bench.vllm.run import VllmRun
from knockon.bench.vllm.summary import failures, merged, summary
from knockon.models import catalog

HERE = Path(__file__).parent
PARTS = ("agreement", "lossless", "knockon", "speed", "step")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts" / "questions.jsonl")
    parser.add_argument("--domino", default="smollm2-135m-domino")
    parser.add_argument("--dflash", type=Path, help="a plain DFlash drafter of the same target")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--eager", action="store_true", help="no graphs, nothing compiled")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--count", type=int, default=32, help="prompts at most")
    parser.add_argument("--merge", nargs="+", type=Path, help="folders of results; nothing is run")
    return parser.parse_args()


def bench(asked: argparse.Namespace) -> Bench:
    """The small target, exported, and its prompts."""
    target = export("smollm2-135m", asked.folder / "target")
    prompts = read_prompts(asked.prompts, target, asked.count)
    run = VllmRun(
        str(target),
        prompts,
        max_tokens=asked.max_tokens,
        concurrency=8,
        eager=asked.eager,
        max_model_len=max(map(len, prompts)) + asked.max_tokens + 32,
        engine={"gpu_memory_utilization": 0.4},  # this process has a context there, too
    )
    drafters = {"domino": catalog.resolve(asked.domino), "target": None}
    if asked.dflash is not None:
        drafters["dflash"] = asked.dflash
    return Bench(
        run,
        drafters,
        tuple(asked.parts),
        asked.folder / "runs",
        "cuda" if torch.cuda.is_available() else "cpu",
        catalog.resolve("smollm2-135m"),
        {"environment": environment(), "prompts": len(prompts)},
    )


def write(report: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vllm.json").write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    asked = parse()
    if asked.merge:
        files = [folder / "vllm.json" for folder in asked.merge]
        report = merged([json.loads(file.read_text()) for file in files])
        write(report, asked.folder)
    else:
        found = bench(asked)
        report = found.report
        for name, engine in found.engines().items():
            found.measure(name, engine)
            write(report, asked.folder)
    print(summary(report))
    sys.exit(bool(failures(report)))


if __name__ == "__main__":
    main()
