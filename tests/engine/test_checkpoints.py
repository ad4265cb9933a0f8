"""States kept at page boundaries: found along a prefix, given way to, gone with their pages."""

from __future__ import annotations

import pytest

from knockon.engine.checkpoints import Checkpoints
from knockon.engine.pages import PagePool
from knockon.engine.request import Request
from knockon.engine.sampling_params import SamplingParams
from knockon.engine.scheduler import Scheduler

SIZE = 4


def test_the_deepest_one_along_a_prefix_is_found() -> None:
    kept = Checkpoints(10, 3)
    assert kept.deepest([1, 2, 3]) is None
    assert {kept.take(2), kept.take(5), kept.take(3)} == {10, 11, 12}
    found = kept.deepest([1, 2, 3, 4])
    assert found is not None and found.pages == 3
    found = kept.deepest([1, 2])
    assert found is not None and found.pages == 2
    assert kept.deepest([4]) is None


def test_the_one_longest_unused_gives_way() -> None:
    kept = Checkpoints(0, 2)
    first, second = kept.take(1), kept.take(2)
    kept.deepest([1])
    assert kept.take(3) == second
    assert kept.deepest([2]) is None
    found = kept.deepest([1])
    assert found is not None and found.slot == first
    assert kept.take(1) is None  # it has one
    assert kept.kept == 2


def test_none_are_kept_where_there_is_no_room() -> None:
    kept = Checkpoints(4, 0)
    assert kept.take(1) is None
    kept.drop(1)
    assert kept.kept == 0


def test_a_checkpoint_goes_with_its_page() -> None:
    kept = Checkpoints(0, 2)
    pool = PagePool(3, SIZE, checkpoints=kept)
    pages = pool.allocate(2)
    assert pages is not None
    pool.register(list(range(8)), pages)
    for page in pages:
        assert pool.is_cached(page)
        kept.take(page)
    pool.release(pages)
    assert kept.kept == 2
    pool.allocate(1)  # the deeper one is evicted
    assert not pool.is_cached(pages[1])
    assert kept.deepest([pages[1]]) is None
    assert pool.flush() == 1
    assert kept.kept == 0


def make(kept: Checkpoints) -> Scheduler:
    return Scheduler(PagePool(40, SIZE, checkpoints=kept), 2, 100, 1, 64)


def request(name: str, tokens: list[int]) -> Request:
    return Request(name, tokens, SamplingParams(max_tokens=4), seed=0)


def test_prefill_stops_where_prompts_parted_and_where_full_pages_end() -> None:
    kept = Checkpoints(2, 4)
    s = make(kept)
    first = request("a", list(range(14)))
    s.add(first)
    step = s.schedule()
    assert [(c.start, c.count) for c in step.prefill] == [(0, 12)]
    first.length = 12
    s.pool.register(first.tokens, first.pages, 0, 12)
    assert [(c.start, c.count) for c in s.schedule().prefill] == [(12, 2)]
    s.finish(first)
    # Two pages are the same; their keys are there, but no state.
    second = request("b", [*range(9), *range(30, 40)])
    s.add(second)
    step = s.schedule()
    assert step.restored == [] and second.pages[:2] == first_pages(s, list(range(8)))
    assert (second.length, second.kept, second.cached_tokens) == (0, 8, 0)
    assert [(c.start, c.count) for c in step.prefill] == [(0, 8)]
    second.length = 8
    slot = kept.take(second.pages[1])
    assert [(c.start, c.count) for c in s.schedule().prefill] == [(8, 8)]
    third = request("c", [*range(9), *range(50, 55)])
    s.add(third)
    step = s.schedule()
    assert step.restored == [(slot, third)]
    assert (third.length, third.kept, third.cached_tokens) == (8, 8, 8)
    assert third.boundaries == (12,)
    s.preempt(third)
    assert (third.length, third.kept, third.boundaries) == (0, 0, ())


@pytest.mark.parametrize("length", [7, 8, 9])
def test_the_same_prompt_finds_its_state_whatever_its_length(length: int) -> None:
    kept = Checkpoints(2, 4)
    s = make(kept)
    for expected in (0, (length - 1) // SIZE * SIZE):
        r = request("r", list(range(length)))
        s.add(r)
        while r.length < r.prefill_end:
            step = s.schedule()
            assert r.cached_tokens == expected
            r.length += step.prefill[0].count
            s.pool.register(r.tokens, r.pages, r.registered, r.length)
            r.registered = max(r.registered, r.length // SIZE)
            if r.length in r.boundaries:
                kept.take(r.pages[r.length // SIZE - 1])
        s.finish(r)


def first_pages(s: Scheduler, tokens: list[int]) -> list[int]:
    pages = s.pool.match(tokens)
    s.pool.release(pages)
    return pages
