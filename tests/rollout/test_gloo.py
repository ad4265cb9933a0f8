"""The same chains on real processes, over gloo."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from knockon.parallel import VocabShard
from knockon.rollout import TorchGroup
from tests.rollout.exact_cases import exact_case

SIZE, V, CASES = 2, 45, 6
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def rank_program(rank: int, folder: str) -> None:
    """What one process does: every case in every stage; its chains are written to ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=SIZE)
    group = TorchGroup()
    shard = VocabShard.deal(V, SIZE, rank)
    chains = {}
    for seed in range(CASES):
        for dtype in DTYPES:
            case = exact_case(seed, V, batch=2, steps=5, dtype=dtype, specials=seed % 2 == 1)
            for pool_size, exchange in ((0, "full"), (9, "full"), (9, "compact"), (40, "compact")):
                rollout = case.rollout(
                    shard, group, sharded_embedding=True, pool_size=pool_size, exchange=exchange
                )
                key = f"{seed} {dtype} {pool_size} {exchange}"
                chains[key] = case.propose(rollout), case.oracle(pool_size)
    torch.save(chains, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_propose_the_oracles_chains(tmp_path: Path) -> None:
    mp.spawn(rank_program, args=(str(tmp_path),), nprocs=SIZE, join=True)
    for rank in range(SIZE):
        chains = torch.load(tmp_path / f"{rank}.pt")
        assert len(chains) == CASES * len(DTYPES) * 4
        for key, (found, wanted) in chains.items():
            assert found == wanted, f"rank {rank}: {key}"
