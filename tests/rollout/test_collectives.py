"""One exchange a block: at most one collective with the full exchange, two with the compact one."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from knockon.parallel import SingleRank, VocabShard
from tests.rollout.exact_cases import exact_case
from tests.rollout.thread_ranks import ThreadGroup, run_ranks


@pytest.mark.parametrize("size", (2, 3, 8))
@pytest.mark.parametrize(
    ("pool_size", "exchange", "steps", "wanted"),
    (
        (0, "full", 7, {"all_gather": 1}),
        (9, "full", 7, {"all_gather": 1}),
        (9, "compact", 7, {"all_gather": 1, "all_reduce": 1}),
        (9, "compact", 1, {"all_gather": 1}),
        (9, "compact", 0, {}),
    ),
)
def test_collectives_a_block(
    size: int, pool_size: int, exchange: str, steps: int, wanted: dict[str, int]
) -> None:
    case = exact_case(4, 40, batch=2, steps=steps)

    def program(group: ThreadGroup) -> Counter[str]:
        shard = VocabShard.deal(40, size, group.rank)
        rollout = case.rollout(
            shard, group, sharded_embedding=True, pool_size=pool_size, exchange=exchange
        )
        group.calls.clear()
        case.propose(rollout)
        return group.calls

    assert run_ranks(size, program) == [Counter(wanted)] * size


class NoHostRead(TorchDispatchMode):
    """Fails on operators that read the device or whose output shape depends on data."""

    forbidden = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert not any(name.startswith(word) or name == word for word in self.forbidden), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("exchange", ("full", "compact"))
@pytest.mark.parametrize("pool_size", (0, 9))
def test_a_block_reads_nothing_back_to_the_host(exchange: str, pool_size: int) -> None:
    case = exact_case(6, 40, batch=2, steps=5)
    for shard, group in (
        (VocabShard.deal(40, 1, 0), SingleRank()),
        (VocabShard.deal(40, 2, 1), Mirror()),
    ):
        shards = [VocabShard.deal(40, shard.size, r) for r in range(shard.size)]
        rollout = case.rollout(shard, group, pool_size=pool_size, exchange=exchange, shards=shards)
        with NoHostRead():
            rollout(case.draft_hidden, case.bonus, 5)


class Mirror:
    """Rank 1 of 2 whose peer sends what it sends itself: the shapes are those of real work."""

    size, rank = 2, 1

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        out.copy_(x.expand_as(out))

    def all_reduce(self, x: torch.Tensor) -> None:
        x.mul_(2)

    def broadcast(self, x: torch.Tensor) -> None:
        return
