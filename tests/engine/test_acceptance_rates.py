"""Acceptance by position: what a width does not verify, its counts say nothing of."""

from __future__ import annotations

import random
from itertools import accumulate
from operator import mul

import pytest

from knockon.bench.width_simulator import RequestClass
from knockon.engine.acceptance_rates import AcceptanceByPosition, expected_tokens


def test_expected_tokens_are_one_and_the_chances_of_getting_so_far() -> None:
    assert expected_tokens([0.5, 0.5, 0.0]) == [1, 1.5, 1.75, 1.75]
    assert expected_tokens([1.0] * 15)[15] == 16
    assert expected_tokens([]) == [1]


def test_all_accepted_tells_of_the_positions_verified_only() -> None:
    acceptance = AcceptanceByPosition(16)
    acceptance.update(4, [4, 4, 4])
    assert acceptance.evidence == [3, 3, 3] + [0] * 12


def test_a_rejection_is_the_last_position_told_of() -> None:
    acceptance = AcceptanceByPosition(8)
    acceptance.update(8, [1, 3, 8])
    assert acceptance.evidence == [3, 2, 2, 1, 1, 1, 1]


def test_width_1_tells_nothing() -> None:
    acceptance = AcceptanceByPosition(16)
    before = acceptance.rates()
    acceptance.update(1, [1] * 32)
    assert acceptance.evidence == [0] * 15
    assert acceptance.rates() == before


@pytest.mark.parametrize("width", [4, 8, 12])
def test_counts_of_a_narrow_width_give_the_rates_of_a_wide_one(width: int) -> None:
    """The same blocks seen through both widths: equal rates where both look."""
    rates = tuple(0.95 - 0.02 * i for i in range(15))
    kind, source = RequestClass("", rates), random.Random(1)
    narrow, wide = AcceptanceByPosition(16), AcceptanceByPosition(16)
    for _ in range(200):
        draws = [source.random() for _ in range(8)]
        narrow.update(width, [kind.accept_length(width, draw) for draw in draws])
        wide.update(16, [kind.accept_length(16, draw) for draw in draws])
    assert narrow.rates()[: width - 1] == wide.rates()[: width - 1]
    assert set(narrow.rates()[width - 1 :]) == {narrow.rates()[width - 2]}
    for w, (found, true) in enumerate(
        zip(wide.expected_tokens(), expected_tokens(rates), strict=True), 1
    ):
        assert found == pytest.approx(true, rel=0.06), w


def test_the_estimate_follows_a_change() -> None:
    acceptance, source = AcceptanceByPosition(16), random.Random(2)
    for rate in (0.95, 0.6, 0.9):
        kind = RequestClass("", (rate,) * 15)
        for _ in range(300):
            acceptance.update(16, [kind.accept_length(16, source.random()) for _ in range(8)])
        true = expected_tokens([rate] * 15)[15]
        assert acceptance.expected_tokens()[15] == pytest.approx(true, rel=0.08)


def test_evidence_of_positions_no_longer_verified_fades() -> None:
    acceptance = AcceptanceByPosition(16)
    for _ in range(50):
        acceptance.update(16, [9] * 8)
    assert acceptance.rates()[8] < 0.1
    for _ in range(3000):
        acceptance.update(4, [4] * 8)
    assert acceptance.rates()[8] > 0.8


def test_a_draw_gives_each_accept_length_its_chance() -> None:
    kind = RequestClass("", (0.9, 0.5, 0.8))
    survival = list(accumulate(kind.rates, mul))
    draws = [(i + 0.5) / 10_000 for i in range(10_000)]
    for width in (1, 2, 3, 4):
        lengths = [kind.accept_length(width, draw) for draw in draws]
        for position in range(width - 1):
            share = sum(length > position + 1 for length in lengths) / len(lengths)
            assert share == pytest.approx(survival[position], abs=2e-4)
        assert max(lengths) == width
