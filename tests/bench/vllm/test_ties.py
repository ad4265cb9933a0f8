from __future__ import annotations

import pytest

from knockon.bench.vllm.ties import NEAR, judge


@pytest.mark.parametrize(("below", "near"), [(NEAR, True), (NEAR + 0.01, False)])
def test_a_difference_is_a_near_tie_up_to_two_roundings(below, near):
    (found,) = judge([[1, 2]], [[1, 3]], [(0, 1)], [{2: -0.5, 3: -0.5 - below}])
    assert (found.tokens, found.near_tie) == ((2, 3), near)
    assert found.margin == pytest.approx(below)


@pytest.mark.parametrize("row", [{2: -0.1}, {}])
def test_a_token_that_was_not_among_the_best_is_no_near_tie(row):
    (found,) = judge([[1, 2]], [[1, 3]], [(0, 1)], [row])
    assert found.margin is None and not found.near_tie


def test_an_answer_that_only_ended_sooner_is_no_near_tie():
    (found,) = judge([[1, 2]], [[1]], [(0, 1)], [{2: -0.1}])
    assert found.tokens == (2, None) and not found.near_tie
