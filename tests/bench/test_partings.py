from __future__ import annotations

from knockon.bench.partings import first_partings


def test_each_answer_that_differs_is_found_at_its_first_token_that_does():
    ours = [[1, 2, 3], [4, 5], [6, 7, 8], []]
    theirs = [(1, 2, 3), (4, 9), (6, 7), (1,)]
    assert first_partings(ours, theirs) == [(1, 1), (2, 2), (3, 0)]
