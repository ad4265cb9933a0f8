"""The prefix rows' tokens are the best of all ranks', the lowest id of equal keys."""

from __future__ import annotations

import pytest
import torch

from knockon.rollout.fused.pool_base import own_pool_base, own_pool_base_plain
from knockon.rollout.fused.prefix import merge_prefix, merge_prefix_plain

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("ranks", "batch", "prefix"), ((1, 1, 1), (2, 5, 1), (3, 2, 4), (8, 9, 2)))
def test_the_best_key_wins_and_ties_go_to_the_lowest_id(
    device: str, ranks: int, batch: int, prefix: int
) -> None:
    rng = torch.Generator().manual_seed(ranks)
    keys = torch.randint(-3, 3, (ranks, batch, prefix), generator=rng, dtype=torch.int32)
    keys[keys == -3] = torch.iinfo(torch.int32).min  # a shard without ids
    ids = torch.stack(
        [torch.randint(100 * r, 100 * r + 99, (batch, prefix), generator=rng) for r in range(ranks)]
    ).int()
    wanted = [
        [
            min((-int(keys[r, b, j]), int(ids[r, b, j])) for r in range(ranks))[1]
            for j in range(prefix)
        ]
        for b in range(batch)
    ]
    for merge in (merge_prefix, merge_prefix_plain):
        tokens = torch.full((batch, prefix + 2), -1, device=device)
        merge(keys.to(device), ids.to(device), tokens)
        assert tokens[:, :prefix].tolist() == wanted
        assert (tokens[:, prefix:] == -1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_base_logits_of_other_ranks_ids_are_zero(device: str) -> None:
    local = torch.arange(2 * 3 * 5, dtype=torch.float32).view(2, 3, 5).to(device) + 1
    ids = torch.tensor([[9, 10, 13], [11, 12, 14], [10, 30, 0]], dtype=torch.int32, device=device)
    wanted = [[[0, 1, 4], [7, 8, 0], [11, 0, 0]], [[0, 16, 19], [22, 23, 0], [26, 0, 0]]]
    assert own_pool_base(local, ids, 10, 4).tolist() == wanted
    assert own_pool_base_plain(local, ids, 10, 4).tolist() == wanted
