"""The order of logits: by value, signed zeros equal, -inf last of numbers, NaN below, ties low."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knockon.rollout import order
from knockon.rollout.reference import best, candidate_pool, rank_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
VALUES = (math.nan, -math.nan, -math.inf, math.inf, -0.0, 0.0, 1.0, -1.0, 2.0, 0.5)


def logits_of(dtype: torch.dtype, values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_compare_as_the_specification_orders(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    logits = logits_of(dtype, [*VALUES, info.min, info.max, info.tiny, -info.tiny])
    ranked = order.ranks(logits)
    assert ranked.dtype == order.rank_dtype(dtype)
    keys = [rank_of(x) for x in logits.tolist()]
    for i, key in enumerate(keys):
        assert ranked[i] > order.padding_rank(ranked.dtype)
        for j, other in enumerate(keys):
            assert bool(ranked[i] < ranked[j]) == (key < other)
            assert bool(ranked[i] == ranked[j]) == (key == other)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_tabulated_ranks_are_the_order_of_all_65536_patterns(dtype: torch.dtype) -> None:
    logits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    small, wide = order.small_ranks(logits), order.ranks(logits)
    assert small.dtype == torch.int32
    by_rank = wide.argsort(stable=True)
    steps, wide_steps = small[by_rank].diff(), wide[by_rank].diff()
    assert (((steps > 0) == (wide_steps > 0)) & (steps >= 0)).all()
    assert order.padding_rank(torch.int32) == -(2**15) < small.min()
    assert small.max() < 2**15


@pytest.mark.parametrize("dtype", DTYPES)
def test_searching_by_groups_finds_the_same_best(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(1)
    for n in (16, 64, 4096):
        logits = logits_of(dtype, VALUES)[torch.randint(0, len(VALUES), (9, n), generator=rng)]
        logits[0] = math.nan
        logits[1, :-1] = math.nan
        logits[2] = -math.inf
        logits[3] = torch.where(torch.arange(n) % 2 == 0, math.nan, -math.inf).to(dtype)
        wanted = [best(row, list(range(n))) for row in logits.tolist()]
        assert order._argmax_by_groups(logits).tolist() == wanted
        assert order.argmax(logits).tolist() == wanted


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(VALUES), min_size=1, max_size=70),
    st.sampled_from(DTYPES),
    st.data(),
)
def test_argmax_and_pool_are_the_references(
    values: list[float], dtype: torch.dtype, data: st.DataObject
) -> None:
    logits = logits_of(dtype, values)
    k = data.draw(st.integers(1, len(values)))
    assert order.argmax(logits).item() == best(logits.tolist(), list(range(len(values))))
    positions = order.best_positions(order.ranks(logits).unsqueeze(0), k)
    assert positions.tolist() == [candidate_pool([logits.tolist()], k)]
    positions = order.best_positions(order.small_ranks(logits).unsqueeze(0), k)
    assert positions.tolist() == [candidate_pool([logits.tolist()], k)]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_the_fast_selection_is_a_stable_sort(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 50_000, generator=rng).to(dtype)
    if dtype == torch.float32:
        logits = (logits * 100).round() / 100
    logits[0, ::7] = float("nan")
    logits[1, 5:40_000] = -float("inf")
    ranked = order.ranks(logits)
    for k in (1, 700, 2048, 30_000, 50_000):
        plain = order.best_positions_by_sorting(ranked, k)
        assert torch.equal(order.best_positions(ranked, k), plain)
        assert torch.equal(order.best_positions(order.small_ranks(logits), k), plain)
        wider = torch.cat((ranked[0], ranked[1]))[None, :100_000]  # positions beyond 16 bits
        both = torch.cat((logits[0], logits[1]))[None, :100_000]
        plain = order.best_positions_by_sorting(wider, k)
        assert torch.equal(order.best_positions(order.small_ranks(both), k), plain)


def test_long_rows_of_ties_go_to_the_first_of_them() -> None:
    for n in (31, 4096, 49_152, 100_003):
        logits = torch.zeros(2, n, dtype=torch.bfloat16)
        logits[0, n // 3 :: 5] = 1.0
        assert order.argmax(logits).tolist() == [n // 3, 0]
        assert order.ranks(logits).max(dim=-1).indices.tolist() == [n // 3, 0]


def test_rows_with_nan_are_counted_once_each() -> None:
    logits = torch.zeros(2, 3, 5)
    logits[0, 1, :2] = float("nan")
    logits[1, 2, 4] = float("nan")
    logits[1, 0] = float("inf")
    assert order.rows_with_nan(logits).item() == 2
    assert order.rows_with_nan(logits[..., :1]).item() == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_signed_zeros_tie_at_the_cutoff(dtype: torch.dtype) -> None:
    logits = logits_of(dtype, [-1.0, -0.0, 0.0, 1.0, -0.0, 0.0]).unsqueeze(0)
    assert order.best_positions(order.ranks(logits), 2).tolist() == [[1, 3]]
    assert order.argmax(logits[:, :3]).tolist() == [1]
