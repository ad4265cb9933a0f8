"""Check the chain kernels on a GPU against FP64, then time each launch: a tuning aid.

python benchmarks/chain_kernel.py --json chain.json
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from torch import Tensor

from knockon.bench.replay import replay_us
from knockon.rollout.fused.block import INDEXED_REQUESTS
from knockon.rollout.fused.chain import (
    ChainWeights,
    Device,
    PoolBase,
    ResidentLaunch,
    TiledLaunch,
    choose_launch,
    device_of,
    run_chain,
)

V, H, G, E, T, K = 248320, 5120, 1024, 256, 15, 2048
REPLAYS = 100  # a round


def weights(generator: torch.Generator) -> ChainWeights:
    def normal(*shape: int, scale: float) -> Tensor:
        x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        return x.normal_(0, scale, generator=generator)

    return ChainWeights(
        normal(V, 3 * G, scale=1.0),
        normal(3 * G + E, G, scale=G**-0.5 * 2),
        normal(V, E, scale=E**-0.5 * 3),
    )


def inputs(batch: int, generator: torch.Generator, pool: int = K) -> dict[str, Any]:
    logits = torch.empty((T, batch, V), dtype=torch.bfloat16, device="cuda")
    logits.normal_(0, 2.0, generator=generator)
    ids = torch.rand((batch, V), device="cuda", generator=generator).topk(pool).indices
    draft = torch.empty((T - 1, batch, E), device="cuda").normal_(0, 1, generator=generator)
    bonus = torch.randint(0, V, (batch,), device="cuda", generator=generator)
    tokens = torch.full((batch, T), -1, device="cuda")
    tokens[:, 0] = torch.randint(0, V, (batch,), device="cuda", generator=generator)
    base = PoolBase(logits, indexed=True)
    if batch > INDEXED_REQUESTS:
        base = PoolBase(logits[1:].gather(-1, ids.expand(T - 1, -1, -1)), indexed=False)
    return {
        "draft_part": draft,
        "bonus": bonus,
        "tokens": tokens,
        "pool_ids": ids.int(),
        "base": base,
        "prefix": 1,
    }


def margins(w: ChainWeights, x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """FP64 chain fed with ``tokens`` as given: how far each lies under the best, and the best."""
    ids = x["pool_ids"].long()
    base = x["base"].logits.double()
    if x["base"].indexed:
        base = base[1:].gather(-1, ids.expand(T - 1, -1, -1))
    rows = w.correction_out[ids].double()
    state = torch.zeros((len(ids), G), dtype=torch.float64, device="cuda")
    token, lag, best_id = x["bonus"], [], []
    w_hh, w_1 = w.stacked.double().split([3 * G, E])
    for j in range(T):
        i_r, i_u, i_n = w.table[token].double().chunk(3, -1)
        h_r, h_u, h_n = (state @ w_hh.t()).chunk(3, -1)
        reset, update = torch.sigmoid(i_r + h_r), torch.sigmoid(i_u + h_u)
        new = torch.tanh(i_n + reset * h_n)
        state = new + update * (state - new)
        if j >= 1:
            hidden = torch.nn.functional.silu(x["draft_part"][j - 1].double() + state @ w_1.t())
            total = torch.einsum("bke,be->bk", rows, hidden) + base[j - 1]
            chosen = (ids == x["tokens"][:, j : j + 1]).double()
            assert bool((chosen.sum(1) == 1).all()), "a token outside the pool"
            lag.append(total.amax(1) - (total * chosen).sum(1))
            best_id.append(ids.gather(1, total.argmax(1, keepdim=True)))
        token = x["tokens"][:, j]
    return torch.stack(lag, 1), torch.cat(best_id, 1)


def launches(batch: int, device: Device) -> dict[str, ResidentLaunch | TiledLaunch]:
    found: dict[str, ResidentLaunch | TiledLaunch] = {
        "chosen": choose_launch(batch, G, E, 2, device)
    }
    if batch <= 8:
        found["resident c16"] = ResidentLaunch(128, 8, 16)
    m = min(64, max(16, 1 << (batch - 1).bit_length()))
    for block, stages, rows in (
        (128, 4, 128),
        (256, 3, 128),
        (256, 4, 128),
        (512, 2, 128),
        (512, 3, 128),
        (256, 3, 64),
    ):
        if m * block * 6 * (stages - 1) < 180_000:
            found[f"tiled m{m} k{block} s{stages} p{rows}"] = TiledLaunch(
                128, 4, m, block, stages, rows
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--batches", default="1,2,4,8,16,64")
    parser.add_argument("--pool", type=int, default=K)
    parser.add_argument("--only", default="", help="launches whose name contains this")
    parser.add_argument("--seconds", type=float, default=150)
    arguments = parser.parse_args()
    generator = torch.Generator("cuda").manual_seed(0)
    w = weights(generator)
    device = device_of(torch.device("cuda", 0))
    results: list[dict[str, Any]] = []
    began = time.time()
    for batch in map(int, arguments.batches.split(",")):
        x = inputs(batch, generator, arguments.pool)
        for name, launch in launches(batch, device).items():
            if arguments.only not in name or time.time() - began > arguments.seconds:
                continue
            row: dict[str, Any] = {"batch": batch, "launch": name}
            try:
                worst, differing = 0.0, 0
                for _ in range(2):
                    x = inputs(batch, generator, arguments.pool)
                    run_chain(w, launch=launch, **x)
                    lag, best = margins(w, x)
                    worst = max(worst, lag.max().item())
                    differing += int((best != x["tokens"][:, 1:]).sum())
                row |= {"worst_lag": worst, "differing": differing}
                spent = replay_us([lambda: run_chain(w, launch=launch, **x)], REPLAYS)  # noqa: B023
                row["ms"] = spent / 1000
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {str(error)[:90]}"
            results.append(row)
            print(row, flush=True)
    print("\nbest of each batch")
    for batch in sorted({r["batch"] for r in results}):
        timed = sorted(
            (r for r in results if r["batch"] == batch and "ms" in r), key=lambda r: r["ms"]
        )
        for r in timed[:4]:
            print(f"{batch:4d}  {r['ms']:.4f} ms  lag {r['worst_lag']:.2e}  {r['launch']}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
