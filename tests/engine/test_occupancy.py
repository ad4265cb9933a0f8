"""What an engine says it holds is what it holds, and steps carry their own log-probabilities."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.generation import GREEDY, TinyShelf, load

PROMPTS = [[5, 6, 7, 8] * 6, [9, 10, 11] * 8]


@pytest.mark.parametrize("ranks", [1, 2])
def test_occupancy_follows_requests_and_a_flush_empties_the_cache(
    tiny: TinyShelf, ranks: int
) -> None:
    with load(tiny.target(), max_batch_size=1, tp_size=ranks) as llm:
        capacity = llm.capacity()
        assert (capacity.max_batch_size, capacity.max_length) == (1, 512)
        ids = [llm.add(prompt, GREEDY) for prompt in PROMPTS]
        llm.step()
        held = llm.occupancy()
        assert (held.running, held.waiting) == (1, 1)
        assert held.held_pages > 0
        for each in ids:
            llm.abort(each)
        after = llm.occupancy()
        assert (after.running, after.waiting, after.held_pages) == (0, 0, 0)
        assert after.cached_pages == llm.flush_cache() > 0
        assert llm.occupancy().cached_pages == 0


def test_log_probabilities_of_steps_are_those_of_the_result(tiny: TinyShelf) -> None:
    with load(tiny.target(), tiny.drafter("domino")) as llm:
        found = list(llm.stream(PROMPTS[0], replace(GREEDY, logprobs=2)))
        assert all(step.logprobs is None for step in llm.stream(PROMPTS[1], GREEDY))
    finished = found[-1].finished
    assert finished is not None
    assert [info for step in found for info in step.logprobs or []] == finished.logprobs
    assert all(len(step.logprobs or []) == len(step.token_ids) for step in found)
