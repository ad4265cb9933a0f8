"""The rollout of a published checkpoint against the specification read in FP64, block by block.

    python benchmarks/rollout_agreement.py --out FOLDER [--blocks 4096] [--device cuda]

Random weights in the published format are written, loaded as an engine loads them in FP64, FP32 and
BF16, and rolled out with K = 0 and K = 2048. Every chain is held to two readings of the same files:
the specification's contract, roundings included, and one without any rounding. Each chain's first
difference is explained. On a GPU K = 2048 is rolled out by the fused kernels where they run. The
result goes to ``rollout_agreement.json`` in ``--out``, or to ``rollout_agreement_cuda.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from knockon.bench.agreement import (
    Agreement,
    FilesAsWritten,
    LoadedRollout,
    compare,
    draft_blocks,
)
from knockon.bench.environment import environment
from knockon.bench.first_difference import CAUSES
from knockon.bench.random_checkpoint import RandomCheckpoint

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def summary(agreement: Agreement) -> dict[str, Any]:
    """One rollout against one reading, as plain data."""
    first = agreement.first_differences
    return {
        "dtype": str(agreement.dtype).removeprefix("torch."),
        "pool_size": agreement.pool_size,
        "implementation": agreement.implementation,
        "reading": agreement.reading,
        "blocks": agreement.blocks,
        "proposals": agreement.proposals,
        "blocks_differing": len(first),
        "proposals_differing": agreement.differing,
        "smallest_lead": agreement.smallest_lead,
        "base_logits_with_other_bits": agreement.other_base_logits,
        "first_differences": {
            cause: {
                "count": len(found),
                "at_the_pools_cutoff": sum(d.at_cutoff for d in found),
                "margin_median": statistics.median(d.margin for d in found),
                "margin_max": max(d.margin for d in found),
                "margin_in_spacings_max": max(d.margin / d.spacing for d in found),
                "margin_by_what_rounding_moved_max": max(
                    d.margin / d.moved if d.moved else 0.0 for d in found
                ),
            }
            for cause in CAUSES
            if (found := [d for d in first if d.cause == cause])
        },
        "examples": [asdict(d) for d in first[:3]],
    }


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """For people."""
    out = Table(title=title)
    out.add_column("dtype")
    columns = (
        "K",
        "by",
        "reading",
        "blocks",
        "proposals",
        "chains that differ",
        "widest margin",
        "why",
    )
    for column in columns:
        out.add_column(column, justify="left" if column in ("by", "reading", "why") else "right")
    for row in rows:
        causes = row["first_differences"]
        widest = max((c["margin_in_spacings_max"] for c in causes.values()), default=None)
        out.add_row(
            row["dtype"],
            str(row["pool_size"]),
            row["implementation"],
            row["reading"],
            f"{row['blocks']:,}",
            f"{row['proposals']:,}",
            str(row["blocks_differing"]),
            "-" if widest is None else f"{widest:.2f} spacings",
            ", ".join(f"{cause} {c['count']}" for cause, c in causes.items()) or "-",
        )
    return out


def main() -> None:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=formatter)
    parser.add_argument("--blocks", type=int, default=4096, help="blocks rolled out in each case")
    parser.add_argument("--vocab-size", type=int, default=5003, help="V")
    parser.add_argument("--pool-sizes", type=int, nargs="+", default=[0, 2048], help="K")
    parser.add_argument("--seed", type=int, default=0, help="of weights and contexts")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON file")
    args = parser.parse_args()
    if args.blocks < 1 or args.vocab_size < 1 or min(args.pool_sizes) < 0:
        parser.error("--blocks and --vocab-size must be at least 1, --pool-sizes at least 0")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    console = Console(width=120)
    recipe = RandomCheckpoint(vocab_size=args.vocab_size, seed=args.seed)
    start = time.perf_counter()
    rows = []
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as progress:
        target, draft = recipe.save(Path(folder))
        z, bonus = draft_blocks(target, draft, args.blocks, args.seed)
        z, bonus = z.to(args.device), bonus.to(args.device)
        files = FilesAsWritten(target, draft, args.device)
        task = progress.add_task("blocks", total=args.blocks * len(args.pool_sizes))
        for pool_size in args.pool_sizes:
            rollouts = [
                LoadedRollout(target, draft, dtype, pool_size, args.device) for dtype in DTYPES
            ]
            agreements = compare(
                files, rollouts, z, bonus, lambda blocks: progress.advance(task, blocks)
            )
            rows += [summary(agreement) for agreement in agreements]
    seconds = time.perf_counter() - start
    where = "CPU" if args.device == "cpu" else torch.cuda.get_device_name()
    console.print(
        table(rows, f"{where}: rollout against the specification in FP64, V = {args.vocab_size}")
    )
    console.print(
        "contract: with the roundings that the specification fixes; unrounded: with none. Spacing: "
        "between neighbouring numbers of the head's dtype, at the larger of the two base logits."
    )
    result = {
        "what": f"{where}: chains of a random checkpoint against the specification in FP64",
        "environment": environment(),
        "checkpoint": asdict(recipe),
        "seconds": round(seconds, 1),
        "rows": rows,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    name = "rollout_agreement.json" if args.device == "cpu" else "rollout_agreement_cuda.json"
    out = args.out / name
    out.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"written to {out} after {seconds:.0f} s")


if __name__ == "__main__":
    main()
