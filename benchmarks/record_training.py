"""Gather what a training run left behind into one JSON file and a plot of its curve.

    python benchmarks/record_training.py --work DIR --out benchmarks/results/drafter_NAME

``DIR`` is the work folder of ``benchmarks/train_smollm2.py``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def gather(work: Path, device: str) -> dict[str, Any]:
    """Facts of generation and training, accept lengths, and the logged curve."""
    return {
        "what": "training of a drafter; accept lengths by replaying the target's own answers",
        "device": device,
        "generation": json.loads((work / "generate.json").read_text()),
        "training": json.loads((work / "train.json").read_text()),
        "accept_length_by_width": json.loads((work / "accept.json").read_text()),
        "curve": [json.loads(line) for line in (work / "train.jsonl").read_text().splitlines()],
    }


def plot(facts: dict[str, Any], path: Path) -> None:
    """Losses and the teacher-forced accept length against the step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curve = facts["curve"]
    steps = [line["step"] for line in curve]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    left.plot(steps, [line["base"] for line in curve], label="base alone", color="#9aa5b1")
    left.plot(steps, [line["final"] for line in curve], label="with the Domino head")
    left.set(xlabel="step", ylabel="cross-entropy, weighted (half soft labels)", ylim=(0, None))
    left.legend()
    right.plot(steps, [line["forced_accept"] for line in curve], label="teacher-forced, block 16")
    table = facts["accept_length_by_width"]
    mean = sum(row["16"] for row in table.values() if isinstance(row, dict)) / len(table)
    right.axhline(mean, color="#cf1124", linestyle="--", label=f"chained, held out: {mean:.2f}")
    right.set(xlabel="step", ylabel="accept length", ylim=(1, None))
    right.legend()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    parser.add_argument("--device", default="one NVIDIA H200, torch 2.11, triton 3.6")
    args = parser.parse_args()
    facts = gather(args.work, args.device)
    args.out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    plot(facts, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
