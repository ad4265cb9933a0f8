"""Pool selection on one GPU: each kernel alone under several launch settings, then the whole.

    python benchmarks/select_kernel.py --out select_kernel.json [--variants]

Random BF16 logits of 15 rows. Every kernel is checked against its plain twin before it is timed.
A time is the median of 5 rounds of 100 CUDA-graph replays; a graph holds several calls in a row, so
that a kernel of a few microseconds is not hidden behind the launch of the graph.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from knockon.bench.replay import replay_us
from knockon.rollout.fused.best_k import best_k, launch_best_k
from knockon.rollout.fused.select import choose, list_candidates, scan, select, select_kernel
from knockon.rollout.fused.select_launch import BestLaunch, SelectLaunch, select_launch
from knockon.rollout.fused.select_plain import best_k_plain, select_plain

ROWS, PREFIX, POOL = 15, 1, 2048
REPLAYS = 100


def microseconds(call: Callable[[], Any], calls: int) -> float:
    """One call's time, of ``calls`` in a graph."""
    return replay_us([call] * calls, REPLAYS)


def list_variants(launch: SelectLaunch, batch: int) -> list[SelectLaunch]:
    """Variants of ``list_groups``; those with other groups or parts change the other kernels."""
    parts = {1: (16, 64), 8: (8, 32), 64: (4,)}[batch]
    found = [replace(launch, parts=n) for n in parts]
    found += [replace(launch, list_tile=tile) for tile in (128, 256) if tile < launch.list_tile]
    found += [replace(launch, list_warps=8), replace(launch, group=2 * launch.group)]
    return found


def choose_variants(launch: SelectLaunch) -> list[SelectLaunch]:
    sizes = [(4096, 4), (4096, 16), (8192, 16)]
    return [replace(launch, best_tile=tile, best_warps=warps) for tile, warps in sizes]


def time_select(local: Tensor, variants: bool) -> dict[str, Any]:
    """Times of one size, with what each kernel's variants took."""
    _, batch, width = local.shape
    calls = 2 if batch >= 64 else 10
    nan_rows = torch.zeros((), dtype=torch.int64, device="cuda")
    launch = select_launch(batch, width, POOL)
    wanted = select_plain(local, width, 0, PREFIX, POOL, nan_rows)

    def check(which: SelectLaunch) -> None:
        got = select_kernel(local, width, 0, PREFIX, POOL, nan_rows, which)
        for one, other in zip(got, wanted, strict=True):
            if not torch.equal(one, other):
                raise SystemExit(f"wrong selection: batch {batch}, width {width}, {which}")

    check(launch)
    scanned = scan(local, width, PREFIX, launch)
    lists = list_candidates(scanned, POOL, launch)
    result: dict[str, Any] = {
        "batch": batch,
        "width": width,
        "launch": asdict(launch),
        "listed": lists.counts.sum(-1).float().mean().item(),
        "most_in_a_part": lists.counts.max().item(),
        "select": microseconds(lambda: select(local, width, 0, PREFIX, POOL, nan_rows), calls),
        "scan_rows": microseconds(lambda: scan(local, width, PREFIX, launch), calls),
        "list_groups": microseconds(lambda: list_candidates(scanned, POOL, launch), calls),
        "choose_listed": microseconds(
            lambda: choose(scanned, lists, 0, POOL, nan_rows, launch), calls
        ),
        "amax_only": microseconds(lambda: local.amax(0), calls),
        "topk_only": microseconds(lambda: local[0].topk(POOL, sorted=False), calls),
    }
    if not variants:
        return result
    timed = []
    for which in list_variants(launch, batch):
        check(which)
        again = scan(local, width, PREFIX, which)
        spent = microseconds(
            lambda which=which, again=again: list_candidates(again, POOL, which), calls
        )
        timed.append(("list_groups", which, spent))
    for which in choose_variants(launch):
        check(which)
        spent = microseconds(
            lambda which=which: choose(scanned, lists, 0, POOL, nan_rows, which), calls
        )
        timed.append(("choose_listed", which, spent))
    result["variants"] = [
        {"kernel": kernel, "launch": asdict(which), "microseconds": spent}
        for kernel, which, spent in timed
    ]
    return result


def time_best_k(batch: int) -> dict[str, Any]:
    keys = torch.randn((batch, 2 * POOL), device="cuda").bfloat16().view(torch.int16).int()
    ids = torch.arange(2 * POOL, dtype=torch.int32, device="cuda").repeat(batch, 1)
    if not torch.equal(best_k(keys, ids, POOL), best_k_plain(keys, ids, POOL)):
        raise SystemExit(f"wrong merge: batch {batch}")
    return {
        "batch": batch,
        "entries": 2 * POOL,
        "k": POOL,
        "best_k": microseconds(lambda: best_k(keys, ids, POOL), 10),
        "variants": {
            f"warps={warps} parts={parts}": microseconds(
                lambda warps=warps, parts=parts: launch_best_k(
                    keys, ids, POOL, BestLaunch(2 * POOL, warps, parts)
                ),
                10,
            )
            for warps, parts in ((4, 4), (8, 1), (8, 2), (8, 8), (16, 4))
        },
    }


def print_tables(sizes: list[dict[str, Any]], merges: list[dict[str, Any]]) -> None:
    parts = ("select", "scan_rows", "list_groups", "choose_listed", "amax_only", "topk_only")
    print("microseconds a call")
    print("".join(f"{name:>14}" for name in ("N", "B", *parts, "listed", "most")))
    for size in sizes:
        cells = [str(size["width"]), str(size["batch"])]
        cells += [f"{size[name]:.1f}" for name in parts]
        cells += [f"{size['listed']:.0f}", str(size["most_in_a_part"])]
        print("".join(f"{cell:>14}" for cell in cells))
    for size in sizes:
        for tried in size.get("variants", ()):
            launch = tried["launch"]
            names = {
                "list_groups": ("group", "parts", "list_tile", "list_warps"),
                "choose_listed": ("best_tile", "best_warps"),
            }[tried["kernel"]]
            setting = " ".join(f"{name}={launch[name]}" for name in names)
            where = f"N={size['width']} B={size['batch']}"
            print(f"{where} {tried['kernel']} {setting}: {tried['microseconds']:.1f}")
    for merge in merges:
        tried = ", ".join(f"{name}: {spent:.1f}" for name, spent in merge["variants"].items())
        print(f"best_k B={merge['batch']}: {merge['best_k']:.1f} ({tried})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--variants", action="store_true", help="time other launch settings too")
    args = parser.parse_args()
    torch.manual_seed(0)
    begun = time.monotonic()
    sizes = []
    for width in (248320, 124160):
        for batch in (1, 8, 64):
            local = torch.randn((ROWS, batch, width), device="cuda", dtype=torch.bfloat16)
            sizes.append(time_select(local, args.variants))
            print(f"N={width} B={batch} done after {time.monotonic() - begun:.0f} s", flush=True)
    merges = [time_best_k(batch) for batch in (1, 8, 64)]
    print_tables(sizes, merges)
    record = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "rows": ROWS,
        "pool": POOL,
        "dtype": "bfloat16",
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record | {"select": sizes, "best_k": merges}, indent=1) + "\n")


if __name__ == "__main__":
    main()
