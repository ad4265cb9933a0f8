"""Gather what a training run left behind into one JSON file and a plot of its curve.

    python benchmarks/record_training.py --work DIR --out benchmarks/results/drafter_NAME

``DIR`` is the work folder of ``knockon train``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from knockon.train.curve import plot_curve, read_curve


def gather(work: Path, device: str) -> dict[str, Any]:
    """Facts of generation and training, accept lengths, and the logged curve."""
    return {
        "what": "training of a drafter; accept lengths by replaying the target's own answers",
        "device": device,
        "generation": json.loads((work / "generate.json").read_text()),
        "training": json.loads((work / "train.json").read_text()),
        "accept_length_by_width": json.loads((work / "accept.json").read_text()),
        "curve": read_curve(work / "train.jsonl"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    parser.add_argument("--device", default="one NVIDIA H200, torch 2.11, triton 3.6")
    args = parser.parse_args()
    facts = gather(args.work, args.device)
    args.out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    table = facts["accept_length_by_width"]
    rows = [row for name, row in table.items() if name != "mean"]
    widest = max((key for key in rows[0] if key.isdigit()), key=int)
    mean = sum(row[widest] for row in rows) / len(rows)
    plot_curve(facts["curve"], args.out.with_suffix(".png"), mean)


if __name__ == "__main__":
    main()
