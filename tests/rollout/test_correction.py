"""Pool corrections in FP32 and in parts choose the oracle's tokens, whatever the base logits."""

from __future__ import annotations

import math

import pytest
import torch

from knockon.rollout.candidates import Candidates
from knockon.rollout.correction import PoolInParts, PoolOnly, reads_in_parts
from knockon.rollout.reference import best


def test_both_ways_to_read_the_pool_choose_the_best_sum() -> None:
    rng = torch.Generator().manual_seed(0)
    values = torch.tensor([math.nan, -math.inf, math.inf, -0.0, 0.0, 1.0, -3.0])
    for trial in range(40):
        batch, pool, width, steps = 3, 9, 4, 2
        ids = torch.stack(
            [torch.randperm(30, generator=rng)[:pool].sort()[0] for _ in range(batch)]
        )
        allowed = values[: 2 + trial % 6] if trial % 2 else values[2:]
        planted = torch.randint(0, len(allowed), (steps, batch, pool), generator=rng)
        base = allowed[planted].bfloat16()
        weight = torch.randint(-2, 3, (30, width), generator=rng).bfloat16()
        hidden = torch.randint(-3, 4, (batch, width), generator=rng).float()
        for kind, finite in ((PoolOnly, False), (PoolOnly, True), (PoolInParts, True)):
            correction = kind(Candidates(ids, base.clone()), weight, 1, torch.float32, finite)
            for j in (1, 2):
                token = torch.empty(batch, dtype=torch.int64)
                correction.choose(j, hidden, token)
                for b in range(batch):
                    sums = base[j - 1, b].double() + weight[ids[b]].double() @ hidden[b].double()
                    wanted = ids[b, best(sums.tolist(), list(range(pool)))]
                    assert token[b] == wanted, (kind.__name__, finite)


@pytest.mark.parametrize("kind", (PoolOnly, PoolInParts))
def test_a_weight_that_is_not_a_number_never_wins(kind: type[PoolOnly]) -> None:
    base = torch.zeros(1, 1, 3, dtype=torch.bfloat16)
    weight = torch.tensor([[math.nan], [-1.0], [1.0]], dtype=torch.bfloat16)
    token = torch.empty(1, dtype=torch.int64)
    correction = kind(Candidates(torch.arange(3)[None], base), weight, 0, torch.float32, False)
    correction.choose(0, torch.ones(1, 1), token)
    assert token.item() == 2


def test_only_large_bf16_pools_on_a_gpu_are_read_in_parts() -> None:
    large, small = 64 * 2048 * 256, 8 * 2048 * 256
    assert reads_in_parts(large, torch.bfloat16, True)
    assert not reads_in_parts(small, torch.bfloat16, True)
    assert not reads_in_parts(large, torch.float16, True)
    assert not reads_in_parts(large, torch.float32, True)
    assert not reads_in_parts(large, torch.bfloat16, False)
