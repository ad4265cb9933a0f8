"""The same chains on real processes, over gloo, and the collectives that they really enter."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

from knockon.parallel import VocabShard
from knockon.rollout import TorchGroup
from tests.rollout.exact_cases import cut_shards, exact_case

SIZES, CASES, STEPS = (2, 4), 2, 5
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# 45 ids, which neither 2 nor 4 divides; 40 are more than a dealt shard holds.
V = 45
STAGES = ((0, "full"), (9, "full"), (40, "full"), (1, "compact"), (9, "compact"), (40, "compact"))


def shards_of(kind: str, size: int) -> list[VocabShard]:
    """Every rank's shard: dealt evenly, unevenly with padding on all, or with empty ones."""
    if kind == "dealt":
        return [VocabShard.deal(V, size, rank) for rank in range(size)]
    cuts = {"uneven": [100, 130, 700], "empty": [0, 600, 600]}[kind]
    return cut_shards(V, cuts[: size - 1], extra_padding=2)


class Collectives(TorchDispatchMode):
    """Counts what is handed to ``torch.distributed``, whoever hands it over."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts["all_reduce" if "allreduce" in func.__name__ else "all_gather"] += 1
        return func(*args, **(kwargs or {}))


class Block(NamedTuple):
    """One block as a rank saw it."""

    chain: list[list[int]]
    wanted: list[list[int]]
    collectives: dict[str, int]


def rank_program(rank: int, size: int, folder: str) -> None:
    """What one process does: every case in every stage; its blocks are written to ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    group = TorchGroup()
    blocks: dict[str, Any] = {}
    for seed in range(CASES):
        for dtype in DTYPES:
            case = exact_case(seed, V, batch=2, steps=STEPS, dtype=dtype, specials=seed % 2 == 1)
            wanted = {pool_size: case.oracle(pool_size) for pool_size, _ in STAGES}
            for kind in ("dealt", "uneven", "empty"):
                for pool_size, exchange in STAGES:
                    rollout = case.rollout(
                        shards_of(kind, size)[rank],
                        group,
                        sharded_embedding=True,
                        pool_size=pool_size,
                        exchange=exchange,
                    )
                    with Collectives() as collectives:
                        chain = case.propose(rollout)
                    block = Block(chain, wanted[pool_size], dict(collectives.counts))
                    blocks[f"{seed} {dtype} {kind} {pool_size} {exchange}"] = tuple(block)
    torch.save(blocks, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("size", SIZES)
def test_every_process_proposes_the_oracles_chains_after_one_exchange(
    tmp_path: Path, size: int
) -> None:
    mp.spawn(rank_program, args=(size, str(tmp_path)), nprocs=size, join=True)
    for rank in range(size):
        blocks = torch.load(tmp_path / f"{rank}.pt")
        assert len(blocks) == CASES * len(DTYPES) * 3 * len(STAGES)
        for key, found in blocks.items():
            block = Block(*found)
            assert block.chain == block.wanted, f"rank {rank}: {key}"
            compact = key.endswith("compact")
            once = {"all_gather": 1, "all_reduce": 1} if compact else {"all_gather": 1}
            assert block.collectives == once, f"rank {rank}: {key}"
