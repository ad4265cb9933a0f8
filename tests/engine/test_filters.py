"""Top-k, top-p, min-p against slow per-row references, alone, together, and per row of a batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knockon.engine.filters import filter_logits, temper

OFF = (0, 1.0, 0.0)


def reference(row: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The ids kept of one row, straight from the definitions."""
    kept = {i for i, x in enumerate(row) if x > -math.inf}
    if top_k:
        kth = sorted(row, reverse=True)[min(top_k, len(row)) - 1]
        kept = {i for i in kept if row[i] >= kth}
    if top_p < 1:
        total = math.fsum(math.exp(row[i]) for i in kept)
        above = {
            i: math.fsum(math.exp(row[j]) for j in kept if row[j] > row[i]) / total for i in kept
        }
        kept = {i for i in kept if above[i] < top_p}
    if min_p > 0:
        best = max(row)
        kept = {i for i in kept if math.exp(row[i] - best) >= min_p}
    return kept


def run(logits: torch.Tensor, settings_: list[tuple[int, float, float]]) -> list[set[int]]:
    ks, ps, ms = zip(*settings_, strict=True)
    kept = filter_logits(
        logits,
        torch.tensor(ks),
        torch.tensor([p if p < 1 else math.inf for p in ps]),
        torch.tensor([math.log(m) if m > 0 else -math.inf for m in ms]),
        max_top_k=max(ks),
        any_top_p=any(p < 1 for p in ps),
        any_min_p=any(m > 0 for m in ms),
        top_p_within_top_k=all(k > 0 for k, p in zip(ks, ps, strict=True) if p < 1),
    )
    unchanged = (kept == logits) | (kept == -torch.inf)
    assert unchanged.all()
    return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in kept]


SETTINGS = st.tuples(
    st.sampled_from([0, 1, 2, 5, 31, 100]),
    st.sampled_from([1.0, 0.01, 0.5, 0.83, 0.999]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(SETTINGS, min_size=1, max_size=4), st.integers(0, 10**6), st.booleans())
def test_each_row_equals_the_reference(
    rows: list[tuple[int, float, float]], seed: int, coarse: bool
) -> None:
    logits = torch.randn(len(rows), 31, generator=torch.Generator().manual_seed(seed)) * 3
    if coarse:  # many exact ties, and some tokens banned
        logits = (logits.round() - 0.1).masked_fill(logits < -5, -torch.inf)
    logits = temper(logits, torch.ones(len(rows)))
    expected = [
        reference(row, *setting) for row, setting in zip(logits.tolist(), rows, strict=True)
    ]
    assert run(logits, rows) == expected


@pytest.mark.parametrize("setting", [(3, 1.0, 0.0), (0, 0.4, 0.0), (0, 1.0, 0.5)])
def test_a_filter_of_the_second_row_leaves_the_first_whole(
    setting: tuple[int, float, float],
) -> None:
    logits = temper(torch.randn(2, 64, generator=torch.Generator().manual_seed(1)), torch.ones(2))
    first, second = run(logits, [OFF, setting])
    assert first == set(range(64))
    assert 0 < len(second) < 64


def test_top_p_keeps_at_least_the_best_and_ties_of_the_last() -> None:
    logits = temper(torch.tensor([[2.0, 2.0, 0.0, 0.0, -9.0]]), torch.ones(1))
    assert run(logits, [(0, 1e-6, 0.0)]) == [{0, 1}]
    assert run(logits, [(0, 0.9, 0.0)]) == [{0, 1, 2, 3}]


def test_top_p_reads_the_mass_that_top_k_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    logits = temper(logits, torch.ones(1))
    assert run(logits, [(0, 0.65, 0.0)]) == [{0, 1}]
    assert run(logits, [(2, 0.55, 0.0)]) == [{0}]  # 0.4 / 0.7 = 0.571


def test_temperature_scales_and_any_small_one_runs_into_greedy() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]] * 4)
    out = temper(logits, torch.tensor([2.0, 0.5, 1e-30, 0.0]))
    assert out.tolist() == [
        [-1.0, 0.0, -0.5],
        [-4.0, 0.0, -2.0],
        [out[2, 0].item(), 0.0, out[2, 2].item()],
        [-2.0, 0.0, -1.0],
    ]
    assert (out[2, [0, 2]] < -1e29).all()
    dead = temper(torch.full((1, 3), -torch.inf), torch.ones(1))
    assert (dead == -torch.inf).all()
