"""The merge of offers equals a plain sort by key, then id."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from knockon.rollout.fused.best_k import best_k_kernel
from knockon.rollout.fused.keys import SENTINEL
from knockon.rollout.fused.select_plain import best_k_plain


def offers(
    batch: int, entries: int, spread: int, sentinels: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(entries)
    keys = torch.randint(-spread, spread + 1, (batch, entries), generator=rng, dtype=torch.int32)
    ids = torch.arange(entries, dtype=torch.int32).expand(batch, -1) * 3 + 11
    keys[:, entries // 2 : entries // 2 + sentinels] = SENTINEL
    return keys.to(device), ids.contiguous().to(device)


def check(keys: Tensor, ids: Tensor, k: int) -> None:
    got = best_k_kernel(keys, ids, k)
    assert got.dtype == torch.int32
    assert torch.equal(got, best_k_plain(keys, ids, k))
    for row_keys, row_ids, row in zip(keys.tolist(), ids.tolist(), got.tolist(), strict=True):
        ranked = sorted(zip(row_keys, row_ids, strict=True), key=lambda e: (-e[0], e[1]))
        assert row == sorted(i for _, i in ranked[:k])


@pytest.mark.parametrize("spread", [0, 2, 1 << 30])
@pytest.mark.parametrize(("entries", "k"), [(96, 40), (96, 96), (1, 1), (200, 1)])
def test_the_best_in_any_mix_of_ties(
    spread: int, entries: int, k: int, kernel_device: torch.device
) -> None:
    check(*offers(2, entries, spread, 0, kernel_device), k)


def test_sentinels_never_win(kernel_device: torch.device) -> None:
    keys, ids = offers(2, 96, 2, 30, kernel_device)
    ids[:, 48:78] = 5  # a sentinel's id is padding's, out of order
    check(keys, ids, 66)


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0, 100, 1 << 30])
@pytest.mark.parametrize("entries", [4096, 6144, 16384, 65536])
def test_offers_of_many_ranks(spread: int, entries: int, kernel_device: torch.device) -> None:
    check(*offers(64, entries, spread, 500, kernel_device), 2048)
