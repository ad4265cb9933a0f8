"""Sizes that graphs are made for."""

from __future__ import annotations

import pytest

from knockon.engine.graphs import (
    PrefillKey,
    bucket_of,
    first_prefills,
    prefill_shape,
    together,
)


def test_a_batch_beyond_every_bucket_has_none() -> None:
    assert [bucket_of(batch, (1, 2, 8)) for batch in (1, 2, 3, 8, 9)] == [1, 2, 8, 8, None]
    assert bucket_of(1, ()) is None


def test_prefills_are_rounded_up_to_few_sizes() -> None:
    assert prefill_shape(1, 5, 5, 1024) == PrefillKey(1, 16)
    assert prefill_shape(1, 90, 90, 1024) == PrefillKey(1, 96)
    assert prefill_shape(3, 40, 110, 1024) == PrefillKey(4, 48)
    assert prefill_shape(1, 1024, 1024, 1024) == PrefillKey(1, 1024)
    assert prefill_shape(1, 1025, 1025, 1024) is None  # too large
    assert prefill_shape(5, 200, 700, 4096) is None  # more padding than it is worth
    assert prefill_shape(1, 7, 7, 0) is None  # no graphs
    for requests, rows in [(1, 1), (2, 17), (7, 45), (64, 64), (1, 700)]:
        key = prefill_shape(requests, rows, requests * rows, 1 << 20)
        assert key is not None and key.requests >= requests and key.rows >= rows


def test_a_start_makes_graphs_of_no_more_requests_than_run_at_once() -> None:
    for at_once, requests in [(1, {1}), (2, {1, 2}), (3, {1, 2, 4}), (64, {1, 2, 4, 8})]:
        found = first_prefills(4096, at_once)
        assert {key.requests for key in found} == requests
        assert max(key.requests * key.rows for key in found) == (1024 if at_once == 1 else 2048)


@pytest.mark.parametrize("most", [4096, 2048, 512])
def test_prompts_that_come_together_find_a_graph_that_a_start_has_made(most: int) -> None:
    made = set(first_prefills(most, 64))
    for longest in (1, 16, 40, 90, 130, 200, 300, 500, 600, 1024):
        for waiting in range(1, 70):
            for shortest in (longest, -(-longest // 2)):
                rows = [longest, *[shortest] * (waiting - 1)]
                count = together(rows, most)
                assert 1 <= count <= waiting
                key = prefill_shape(count, longest, sum(rows[:count]), most)
                assert key in made or (longest > most and key is None)


def test_prompts_of_very_different_length_still_share_a_launch_where_few_rows_are_lost() -> None:
    assert prefill_shape(4, 130, 390, 4096) == PrefillKey(4, 192)  # 378 rows of padding
    assert prefill_shape(4, 260, 520, 4096) is None  # 1016


def test_without_graphs_all_that_are_alike_run_at_once() -> None:
    assert together([40] * 69, 0) == 69
