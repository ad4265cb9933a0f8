"""Paged attention on one GPU, beside PyTorch's SDPA over dense contiguous keys and values.

    python benchmarks/attention.py --json attention.json [--variants | --tiles]

BF16. Every launch is checked against its plain twin in FP32 before it is timed. A time is the
median of 5 rounds of CUDA-graph replays, per call; a graph walks through as many layers' keys and
values as do not fit in the L2 cache together, as a forward would. SDPA reads the same contexts
without pages or masks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from knockon.bench.needs_gpu import needed_gpu
from knockon.bench.replay import replay_us
from knockon.layers.attention import BlockPlan, PagedKV, SdpaBackend, Visibility, plan_block
from knockon.layers.attention.paged import PagedBackend, attend_kernel
from knockon.layers.attention.paged_launch import (
    MOST_BLOCK_ROWS,
    AttentionLaunch,
    attention_launch,
)

PAGE_SIZE = 16
COLD_BYTES, MOST_LAYERS = 200e6, 32
TOLERANCE = 2.4e-2


@dataclass(frozen=True)
class Shape:
    """``context`` keys, the ``rows`` of the block included, with room for ``capacity``."""

    name: str
    batch: int
    rows: int
    context: int
    capacity: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    causal: bool = True

    @property
    def kv_bytes(self) -> int:
        return 4 * self.batch * self.context * self.kv_heads * self.dim


SHAPES = [
    Shape("8B verify", 1, 16, 768, 1024),
    Shape("8B verify, room for 32k", 1, 16, 768, 32768),
    Shape("8B draft", 1, 16, 768, 1024, causal=False),
    Shape("8B verify", 8, 16, 768, 1024),
    Shape("8B verify", 32, 16, 768, 1024),
    Shape("8B decode", 1, 1, 768, 1024),
    Shape("8B decode", 32, 1, 768, 1024),
    Shape("8B long", 1, 16, 131072, 131072),
    Shape("8B long, decode", 1, 1, 131072, 131072),
    Shape("SmolLM2 decode", 512, 1, 300, 512, 9, 3, 64),
    Shape("SmolLM2 verify", 64, 16, 300, 512, 9, 3, 64),
    Shape("8B prompt", 1, 256, 256, 1024),
    Shape("8B prompts", 32, 256, 256, 1024),
    Shape("8B long prompt", 1, 8192, 8192, 8192),
]


def make_layers(shape: Shape) -> tuple[list[PagedKV], BlockPlan]:
    """Keys and values of several layers, in shuffled pages that all share, and a plan."""
    width = shape.capacity // PAGE_SIZE
    used = -(-shape.context // PAGE_SIZE)
    pages = torch.randperm(shape.batch * used, device="cuda").view(shape.batch, used) + 1
    page_table = F.pad(pages, (0, width - used))
    slots = (shape.batch * used + 1) * PAGE_SIZE
    count = min(MOST_LAYERS, max(1, round(COLD_BYTES / shape.kv_bytes)))
    sizes = (slots, shape.kv_heads, shape.dim)
    layers = []
    for _ in range(count):
        kv = PagedKV.allocate(*sizes, torch.bfloat16, "cuda")
        layers.append(PagedKV(kv.k.normal_(), kv.v.normal_()))
    starts = torch.full((shape.batch,), shape.context - shape.rows, device="cuda")
    plan = plan_block(page_table, PAGE_SIZE, starts, shape.rows, shape.context)
    return layers, plan


def dense(kv: PagedKV, plan: BlockPlan, shape: Shape) -> tuple[Tensor, Tensor]:
    """The context as ``[B, kv_heads, context, dim]``."""
    slots = plan.context_slots[:, : shape.context]
    k, v = (pages[slots].transpose(1, 2).contiguous() for pages in kv)
    return k, v


def variants(shape: Shape, launch: AttentionLaunch) -> list[AttentionLaunch]:
    """Settings near the chosen ones."""
    found = [replace(launch, stages=stages) for stages in (1, 2, 4, 5)]
    found += [replace(launch, block_n=n) for n in (launch.block_n // 2, launch.block_n * 2)]
    found += [replace(launch, warps=warps) for warps in (2, 4, 8) if warps != launch.warps]
    splits = {1, 2, launch.splits // 2, launch.splits * 2} - {0, launch.splits}
    found += [replace(launch, splits=number) for number in sorted(splits)]
    if launch.block_m >= 64:
        found.append(replace(launch, block_m=192 - launch.block_m, warps=12 - launch.warps))
    return found


def launch_of(shape: Shape) -> AttentionLaunch:
    return attention_launch(
        shape.batch,
        shape.rows,
        shape.heads // shape.kv_heads,
        shape.kv_heads,
        shape.dim,
        shape.capacity,
        2,
        torch.cuda.get_device_properties("cuda").multi_processor_count,
    )


def tiles(shape: Shape, launch: AttentionLaunch) -> list[AttentionLaunch]:
    """Other tiles of queries: of a verified block, and of a prompt."""
    if shape.rows <= MOST_BLOCK_ROWS:
        found = [replace(launch, block_m=m, stages=3) for m in (16, 32, 64)]
        found.append(replace(launch, block_m=32, stages=2))
        found.append(replace(launch, block_m=32, splits=2 * launch.splits))
    else:
        sizes = ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (128, 128, 8, 2))
        found = [
            replace(launch, block_m=m, block_n=n, warps=warps, stages=stages)
            for m, n, warps, stages in sizes
        ]
    return [which for which in found if which != launch]


def tiled(shape: Shape) -> bool:
    """Whether ``--tiles`` times it."""
    block = shape.rows == MOST_BLOCK_ROWS and shape.causal and shape.capacity <= 1024
    return block or shape.rows > MOST_BLOCK_ROWS


def time_shape(
    shape: Shape, others: Callable[[Shape, AttentionLaunch], list[AttentionLaunch]] | None
) -> dict[str, Any]:
    layers, plan = make_layers(shape)
    q = torch.randn(
        (shape.batch, shape.rows, shape.heads, shape.dim), device="cuda", dtype=torch.bfloat16
    )
    visibility = Visibility(shape.causal)
    launch = launch_of(shape)
    first = layers[0]
    wanted = SdpaBackend().attend(q.float(), PagedKV(*(x.float() for x in first)), plan, visibility)

    one = replace(plan, positions=plan.positions[:, :1].contiguous(), segments=())
    alone = attend_kernel(q[:, :1], first, one, visibility, launch_of(replace(shape, rows=1)))

    def timed(which: AttentionLaunch) -> dict[str, Any]:
        got = attend_kernel(q, first, plan, visibility, which)
        wrong = (got.float() - wanted).abs().max().item()
        if not wrong <= TOLERANCE:
            raise SystemExit(f"wrong attention, by {wrong}: {shape}, {which}")
        spent = replay_us(
            [lambda kv=kv: attend_kernel(q, kv, plan, visibility, which) for kv in layers]
        )
        found = {"launch": asdict(which), "attend_us": spent}
        if shape.rows <= MOST_BLOCK_ROWS and shape.causal:
            found["as_one_row"] = torch.equal(got[:, :1], alone)
        return found

    spent = timed(launch)
    folded = q.transpose(1, 2)
    contexts = [dense(kv, plan, shape) for kv in layers]
    whole_prompt = shape.rows == shape.context
    torch_spent = replay_us(
        [
            lambda k=k, v=v: F.scaled_dot_product_attention(
                folded, k, v, is_causal=whole_prompt, enable_gqa=True
            )
            for k, v in contexts
        ]
    )
    result: dict[str, Any] = asdict(shape) | {
        **spent,
        "layers": len(layers),
        "sdpa_us": torch_spent,
        "kv_tb_per_s": shape.kv_bytes / spent["attend_us"] / 1e6,
    }
    if others is not None:
        result["variants"] = []
        for which in others(shape, launch):
            try:
                result["variants"].append(timed(which))
            except triton.runtime.errors.OutOfResources as error:
                result["variants"].append({"launch": asdict(which), "refused": str(error)})
    # Last, for it changes what was attended to.
    k = v = q[:, :, : shape.kv_heads]
    result["write_us"] = replay_us(
        [lambda kv=kv: PagedBackend().write(k, v, kv, plan) for kv in layers]
    )
    return result


def bits_of(found: dict[str, Any]) -> str:
    return {True: "  as one row", False: "  unlike one row", None: ""}[found.get("as_one_row")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--variants", action="store_true", help="time other launch settings too")
    parser.add_argument("--tiles", action="store_true", help="time other tiles of queries")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    args = parser.parse_args()
    needed_gpu()
    others = tiles if args.tiles else variants if args.variants else None
    torch.manual_seed(0)
    columns = ("attend_us", "write_us", "sdpa_us", "kv_tb_per_s")
    print(f"{'shape':>26}{'B':>5}{'T':>6}{'C':>8}" + "".join(f"{name:>12}" for name in columns))
    results = []
    for shape in SHAPES:
        if args.only not in shape.name or (args.tiles and not tiled(shape)):
            continue
        result = time_shape(shape, others)
        results.append(result)
        sizes = f"{shape.name:>26}{shape.batch:>5}{shape.rows:>6}{shape.context:>8}"
        print(sizes + "".join(f"{result[name]:>12.2f}" for name in columns), flush=True)
        print(f"{'':>57}  {tuple(result['launch'].values())}{bits_of(result)}", flush=True)
        for tried in sorted(result.get("variants", ()), key=lambda x: x.get("attend_us", 1e9)):
            if "attend_us" in tried:
                setting = tuple(tried["launch"].values())
                print(f"{tried['attend_us']:>57.2f}  {setting}{bits_of(tried)}")
        torch.cuda.empty_cache()
    record = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "dtype": "bfloat16",
        "page_size": PAGE_SIZE,
        "shapes": results,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
