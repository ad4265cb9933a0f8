"""Domino inside vLLM on a GPU, beside vLLM's own target-only and DFlash, and beside Knockon.

    python benchmarks/vllm_h200.py FOLDER [--prompts FILE.jsonl] [--dflash DRAFTER] [--parts …]

- agreement: eager runs record every block that the rollout is handed; a rollout made by hand from
  the checkpoints' files must give the same chains, by PyTorch and by the kernels.
- lossless: greedy answers of Domino, eager and in CUDA graphs, against vLLM's target alone; where
  one first differs, the target's own margin between the two tokens says how near a tie it was.
  Accept lengths, beside those of Knockon's engine on the same prompts.
- speed: output tokens a second at concurrency 1 and 8: target, DFlash (with ``--dflash``), Domino.
- step: Qwen3-8B's sizes, random weights, vLLM's synthetic acceptance: milliseconds of a step with
  a DFlash and with a Domino drafter at concurrency 1, 8 and 32.

It needs one of the vLLM versions that the plugin supports, and Knockon installed beside it. Each
run is a process of its own. The result goes to ``vllm.json`` in FOLDER; the exit status is 1 where
a chain or an answer is another and no near tie says why.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm_parts import (
    Prompts,
    accept_length_of_knockon,
    differences,
    qwen3_8b_folders,
    synthetic_step,
)

from knockon.bench.environment import environment
from knockon.bench.export_folder import export
from knockon.bench.vllm.by_hand import chains_alike, rollout_by_hand
from knockon.bench.vllm.run import VllmRun, run_vllm
from knockon.models import catalog

HERE = Path(__file__).parent
PARTS = ("agreement", "lossless", "speed", "step")


def agreement(run: VllmRun, domino: Path, device: str, work: Path) -> dict[str, Any]:
    """How many recorded chains a rollout by hand gives too, by implementation."""
    recorded = run_vllm(replace(run, draft=str(domino), eager=True, record=True), work)
    found: dict[str, Any] = {"accept_length": recorded.accept_length}
    for implementation in ("plain", "fused") if device == "cuda" else ("plain",):
        rollout = rollout_by_hand(
            Path(run.target),
            domino,
            getattr(torch, run.dtype),
            device,
            implementation=implementation,
        )
        same, total = chains_alike(recorded, rollout)
        found[implementation] = {"same": same, "of": total}
    return found


def lossless(run: VllmRun, domino: Path, gguf: Path, work: Path) -> dict[str, Any]:
    """Greedy answers and accept lengths against the target alone and against Knockon."""
    alone = run_vllm(run, work / "alone")
    found: dict[str, Any] = {"vllm": alone.version, "answers": len(alone.tokens)}
    for name, eager in (("eager", True),) if run.eager else (("eager", True), ("graphs", False)):
        drafted = run_vllm(replace(run, draft=str(domino), eager=eager), work / name)
        found[name] = {
            "accept_length": drafted.accept_length,
            "differences": differences(run, alone.tokens, drafted.tokens, work / f"{name}_ties"),
        }
    found["knockon_accept_length"] = accept_length_of_knockon(gguf, domino, run)
    return found


def speed(run: VllmRun, drafters: dict[str, Path | None], work: Path) -> list[dict[str, Any]]:
    """Tokens a second by drafter and concurrency; every request runs to its cap."""
    rows = []
    for concurrency in (1, 8):
        asked = replace(
            run,
            prompts=run.prompts[: 4 * concurrency],
            concurrency=concurrency,
            repeats=2,
            sampling={"ignore_eos": True},
        )
        for name, draft in drafters.items():
            drafted = replace(asked, draft=None if draft is None else str(draft))
            found = run_vllm(drafted, work / f"{name}_{concurrency}")
            rows.append(
                {
                    "drafter": name,
                    "concurrency": concurrency,
                    "tokens_per_second": found.tokens_per_second,
                    "accept_length": found.accept_length,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def step(work: Path) -> list[dict[str, Any]]:
    """Milliseconds of a step at Qwen3-8B's sizes."""
    folders = qwen3_8b_folders(work)
    rows = []
    for concurrency in (1, 8, 32):
        for name in ("dflash", "domino"):
            rows.append(synthetic_step(folders, name, concurrency, work / f"{name}_{concurrency}"))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def failures(report: dict[str, Any]) -> list[str]:
    """What must not be."""
    found = []
    for name, counts in report.get("agreement", {}).items():
        if isinstance(counts, dict) and counts["same"] < counts["of"]:
            found.append(f"{counts['of'] - counts['same']} chains of {name} differ from by hand")
    for name in ("eager", "graphs"):
        for gap in report.get("lossless", {}).get(name, {}).get("differences", ()):
            if not gap["near_tie"]:
                found.append(f"{name}: answer {gap['answer']} differs at {gap['at']}, no near tie")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts" / "questions.jsonl")
    parser.add_argument("--domino", default="smollm2-135m-domino")
    parser.add_argument("--dflash", type=Path, help="a plain DFlash drafter of the same target")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--eager", action="store_true", help="no graphs, nothing compiled")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--count", type=int, default=32, help="prompts at most")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    work = asked.folder / "runs"
    gguf, domino = catalog.resolve("smollm2-135m"), catalog.resolve(asked.domino)
    target = export("smollm2-135m", asked.folder / "target")
    prompts = Prompts.read(asked.prompts, target, asked.count)
    run = VllmRun(
        str(target),
        prompts.ids,
        max_tokens=asked.max_tokens,
        concurrency=8,
        eager=asked.eager,
        max_model_len=max(map(len, prompts.ids)) + asked.max_tokens + 32,
        engine={"gpu_memory_utilization": 0.6},  # this process has a context there, too
    )
    drafters = {"target": None, "dflash": asked.dflash, "domino": domino}
    if asked.dflash is None:
        del drafters["dflash"]
    report: dict[str, Any] = {"environment": environment(), "prompts": len(prompts.ids)}
    parts = {
        "agreement": lambda: agreement(run, domino, device, work / "agreement"),
        "lossless": lambda: lossless(run, domino, gguf, work / "lossless"),
        "speed": lambda: speed(run, drafters, work / "speed"),
        "step": lambda: step(work / "step"),
    }
    for name in asked.parts:
        report[name] = parts[name]()
        print(name, json.dumps(report[name], indent=1), flush=True)
        (asked.folder / "vllm.json").write_text(json.dumps(report, indent=1) + "\n")
    failed = failures(report)
    print("\n".join(failed) or "no difference that rounding does not explain")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
