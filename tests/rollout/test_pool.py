"""The candidate pool: folded scores and two-level selection are the plain ones, ties included."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knockon.rollout import order, pool
from knockon.rollout.reference import candidate_pool

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
VALUES = (math.nan, -math.nan, -math.inf, math.inf, -0.0, 0.0, 1.0, -1.0, 2.0, 0.5)


def hard_logits(seed: int, dtype: torch.dtype, *shape: int, few: bool = True) -> torch.Tensor:
    """Specials and ties everywhere (``few`` values), or random numbers among them."""
    rng = torch.Generator().manual_seed(seed)
    values = torch.tensor(VALUES, dtype=torch.float64)
    planted = values[torch.randint(0, len(values), shape, generator=rng)]
    if few:
        return planted.to(dtype)
    numbers = torch.randn(shape, generator=rng, dtype=torch.float64)
    share = torch.rand(shape, generator=rng) < torch.rand(*shape[:-1], 1, generator=rng) ** 2
    return torch.where(share, planted, numbers).to(dtype)


@settings(max_examples=150)
@given(data=st.data())
def test_folded_scores_and_their_pool_are_the_references(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    steps, batch = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 3))
    real, padding = data.draw(st.integers(1, 150)), data.draw(st.integers(0, 5))
    seed, few = data.draw(st.integers(0, 2**20)), data.draw(st.booleans())
    rows = hard_logits(seed, dtype, steps, batch, real + padding, few=few)
    before = rows.clone()
    scored = pool.scores(rows, real)
    assert torch.equal(rows.nan_to_num(7.5), before.nan_to_num(7.5))
    k = data.draw(st.integers(1, real))
    large = data.draw(st.sampled_from((0, 1 << 22)))
    chosen = pool.choose(scored, k, large=large)
    wanted = [candidate_pool(rows[:, b, :real].tolist(), k) for b in range(batch)]
    assert chosen.tolist() == wanted


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_to_fold_rows_gives_the_same_order(dtype: torch.dtype) -> None:
    rows = hard_logits(1, dtype, 13, 5, 64)
    wanted = order.ranks(rows[0])
    for row in rows[1:]:
        wanted = torch.maximum(wanted, order.ranks(row))
    by_halves = order.highest(rows, 0)
    running = rows[0].clone()
    for row in rows[1:]:
        torch.fmax(running, row, out=running)
    folds = [by_halves, running]
    if dtype != torch.float64:
        folds.append(order.highest_of_rows(rows))
    for fold in folds:
        assert fold.dtype == dtype
        assert torch.equal(order.ranks(fold), wanted)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("few", (True, False))
def test_two_level_selection_is_a_stable_sort(dtype: torch.dtype, few: bool) -> None:
    scored = hard_logits(3, dtype, 3, 70_003, few=few)
    scored[0] = 1.0  # nothing but ties
    scored[1, :60_000] = -math.inf
    ranked = order.ranks(scored)
    for k in (1, 100, 2048, 4000):
        plain = order.best_positions_by_sorting(ranked, k)
        assert torch.equal(pool.choose(scored, k, large=0), plain)
        assert torch.equal(pool.choose(scored, k, large=1 << 40), plain)


def test_padding_is_chosen_last_and_scores_are_fresh() -> None:
    rows = torch.full((2, 1, 40), math.nan, dtype=torch.bfloat16)
    rows[..., 30:] = 999.0
    rows[0, 0, 5] = -math.inf
    scored = pool.scores(rows, 30)
    assert (rows[..., 30:] == 999.0).all()
    for large in (0, 1 << 22):
        assert pool.choose(scored, 32, large=large).tolist() == [list(range(32))]
        assert pool.choose(scored, 1, large=large).tolist() == [[5]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", (1, 3, 20))
def test_the_pool_on_a_gpu_is_a_stable_sort_of_the_rows_best(
    dtype: torch.dtype, batch: int
) -> None:
    for seed, few in enumerate((True, False)):
        rows = hard_logits(seed, dtype, 4, batch, 248_320 if batch > 3 else 30_000, few=few).cuda()
        wanted = order.ranks(rows[0])
        for row in rows[1:]:
            wanted = torch.maximum(wanted, order.ranks(row))
        real = rows.shape[-1] - 100
        wanted = wanted[:, :real]
        for small_row, cached in ((1 << 40, 1), (0, rows[0].nbytes // 2), (0, 1)):
            scored = pool.scores(rows, real, small_row=small_row, cached=cached)
            assert torch.equal(order.ranks(scored[:, :real].contiguous()), wanted)
            assert scored[:, real:].isnan().all()
        for k in (1, 2048):
            plain = order.best_positions_by_sorting(wanted, k)
            assert torch.equal(pool.choose(scored, k, large=1 << 40), plain)
            assert torch.equal(pool.choose(scored, k, large=0), plain)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_of_large_rows_on_a_gpu_is_the_lowest_best(dtype: torch.dtype) -> None:
    logits = hard_logits(5, dtype, 20, 248_320)
    logits[0] = math.nan
    logits[1] = -math.inf
    logits[2, :200_000] = math.nan
    logits[3, 1:] = -0.0
    wanted = order.ranks(logits).argmax(-1)
    assert torch.equal(order.argmax(logits.cuda()).cpu(), wanted)
    assert torch.equal(order.argmax(logits[:, :-16].cuda()).cpu(), order.argmax(logits[:, :-16]))
