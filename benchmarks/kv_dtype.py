"""What KV in FP8 costs a real model in accuracy: its logits beside those with KV as computed.

    python benchmarks/kv_dtype.py --model smollm2-135m --out benchmarks/results

The target answers prompts greedily; prompt and answer then go through it once with KV in its own
type and once in FP8, every row reading keys and values from the pages. Compared over the answers'
rows: the divergence of the two distributions, how often their best token is the same, and the
largest difference of a logit over the largest logit.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor

from knockon import LLM, SamplingParams
from knockon.bench.environment import environment
from knockon.layers.attention import PagedKV, plan_block
from knockon.layers.attention.base import FP8
from knockon.models.catalog import resolve
from knockon.models.target import Target, load_target
from knockon.parallel import SingleRank

HERE = Path(__file__).parent
PAGE = 16


def logits(target: Target, ids: Tensor, kv_dtype: torch.dtype) -> Tensor:
    """Logits ``[T, V]`` of ``ids [T]``, with KV of a type."""
    pages = -(-len(ids) // PAGE)
    kv = [
        PagedKV.allocate((pages + 1) * PAGE, *target.kv_shape[1:], kv_dtype, target.device)
        for _ in range(target.config.num_layers)
    ]
    table = torch.arange(1, pages + 1, device=target.device).unsqueeze(0)
    start = torch.zeros(1, dtype=torch.int64, device=target.device)
    plan = plan_block(table, PAGE, start, len(ids), len(ids))
    return target.logits(target(ids.unsqueeze(0), plan, kv).hidden)[0].float()


def main() -> int:
    """Answer, compare, write."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=formatter)
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="catalogue name or path")
    add("--prompts", type=Path, default=HERE / "prompts" / "questions.jsonl", help="JSON lines")
    add("--count", type=int, default=32)
    add("--new-tokens", type=int, default=128)
    add("--dtype", default="float32")
    add("--device", default="cpu")
    add("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.prompts.read_text("utf-8").split("\n") if line]
    chats = [[{"role": "user", "content": row["prompt"]}] for row in rows[: args.count]]
    with LLM(args.model, dtype=args.dtype, device=args.device) as llm:
        outputs = llm.generate(chats, SamplingParams(temperature=0, max_tokens=args.new_tokens))
    path = resolve(args.model)
    target = load_target(path, getattr(torch, args.dtype), SingleRank(), args.device)
    divergence, same, largest, scale, count = 0.0, 0, 0.0, 0.0, 0
    with torch.inference_mode():
        for output in track(outputs, "comparing", console=Console(stderr=True)):
            ids = torch.tensor(output.prompt_token_ids + output.token_ids, device=args.device)
            first = len(output.prompt_token_ids) - 1
            own, rounded = (logits(target, ids, dtype)[first:-1] for dtype in (target.dtype, FP8))
            ours, theirs = rounded.log_softmax(-1), own.log_softmax(-1)
            divergence += float(F.kl_div(ours, theirs, reduction="sum", log_target=True))
            same += int((own.argmax(-1) == rounded.argmax(-1)).sum())
            largest = max(largest, float((own - rounded).abs().max()))
            scale = max(scale, float(own.abs().max()))
            count += len(own)
    result: dict[str, Any] = {
        "what": "logits of a target with KV in FP8 (E4M3, unscaled) beside KV in its own type",
        "environment": environment(),
        "settings": {k: v.name if isinstance(v, Path) else v for k, v in vars(args).items()},
        "rows": count,
        "mean_divergence_nats": round(divergence / count, 6),
        "same_best_token": round(same / count, 5),
        "largest_difference_over_largest_logit": round(largest / scale, 5),
    }
    path = args.out / f"kv_dtype_{args.dtype}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    print(json.dumps({k: v for k, v in result.items() if k not in ("environment",)}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
