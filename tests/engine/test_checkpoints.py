"""States kept at page boundaries: found along a prefix, given way to, gone with their pages."""

from __future__ import annotations

import pytest

from knockon.engine.checkpoints import Checkpoints
from knockon.engine.pages import PagePool
from knockon.engine.request import Request
from knockon.engine.sampling_params import SamplingParams
from knockon.engine.scheduler import Scheduler

SIZE = 4


def take(kept: Checkpoints, page: int) -> int | None:
    """Reserve a state and keep it."""
    slot = kept.reserve(page)
    if slot is not None:
        kept.keep(page, slot)
    return slot


def test_the_deepest_one_along_a_prefix_is_found() -> None:
    kept = Checkpoints(10, 3)
    assert kept.deepest([1, 2, 3]) is None
    assert {take(kept, 2), take(kept, 5), take(kept, 3)} == {10, 11, 12}
    found = kept.deepest([1, 2, 3, 4])
    assert found is not None and found.pages == 3
    found = kept.deepest([1, 2])
    assert found is not None and found.pages == 2
    assert kept.deepest([4]) is None


def test_the_one_longest_unused_gives_way() -> None:
    kept = Checkpoints(0, 2)
    first, second = take(kept, 1), take(kept, 2)
    kept.deepest([1])
    assert take(kept, 3) == second
    assert kept.deepest([2]) is None
    found = kept.deepest([1])
    assert found is not None and found.slot == first
    assert take(kept, 1) is None  # it has one
    assert kept.kept == 2


def test_none_are_kept_where_there_is_no_room() -> None:
    kept = Checkpoints(4, 0)
    assert take(kept, 1) is None
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
        take(kept, page)
    pool.release(pages)
    assert kept.kept == 2
    pool.allocate(1)  # the deeper one is evicted
    assert not pool.is_cached(pages[1])
    assert kept.deepest([pages[1]]) is None
    assert pool.flush() == 1
    assert kept.kept == 0


def test_a_reserved_one_is_found_nowhere_and_given_to_nobody_until_it_is_kept() -> None:
    kept = Checkpoints(0, 2)
    first, second = kept.reserve(1), kept.reserve(2)
    assert {first, second} == {0, 1} and kept.kept == 0
    assert kept.deepest([1, 2]) is None
    assert kept.reserve(3) is None and take(kept, 3) is None  # neither may be written twice
    assert first is not None
    kept.keep(1, first)
    found = kept.deepest([1, 2])
    assert found is not None and (found.pages, found.slot) == (1, first)
    kept.give_back()
    assert take(kept, 3) == second
    assert kept.reserve(1) is None  # it has one
    assert kept.reserve(4) == first  # the one longest unused has given way
    kept.keep(3, first)  # meanwhile its page has got another
    kept.give_back()
    assert take(kept, 5) == first


def make(kept: Checkpoints, chunk: int = 100, most: int = 64) -> Scheduler:
    return Scheduler(PagePool(most // SIZE * 2, SIZE, checkpoints=kept), 2, chunk, 1, most)


def request(name: str, tokens: list[int]) -> Request:
    return Request(name, tokens, SamplingParams(max_tokens=4), seed=0)


def test_prefill_stops_where_prompts_parted_and_keeps_a_state_where_full_pages_end() -> None:
    kept = Checkpoints(2, 4)
    s = make(kept)
    first = request("a", list(range(14)))
    s.add(first)
    (chunk,) = s.schedule().prefill
    assert (chunk.start, chunk.count, chunk.kept_rows, chunk.kept_slot) == (0, 14, 12, 2)
    first.length = 14
    s.pool.register(first.tokens, first.pages, 0, 14)
    kept.give_back()
    s.finish(first)
    # Two pages are the same; their keys are there, but no state.
    second = request("b", [*range(9), *range(30, 40)])
    s.add(second)
    step = s.schedule()
    assert step.restored == [] and second.pages[:2] == first_pages(s, list(range(8)))
    assert (second.length, second.kept, second.cached_tokens) == (0, 8, 0)
    assert [(c.start, c.count) for c in step.prefill] == [(0, 8)]
    assert step.prefill[0].kept_slot < 0
    second.length = 8
    slot = take(kept, second.pages[1])
    (chunk,) = s.schedule().prefill
    assert (chunk.start, chunk.count, chunk.kept_rows) == (8, 11, 8)
    third = request("c", [*range(9), *range(50, 55)])
    s.add(third)
    step = s.schedule()
    assert step.restored == [(slot, third)]
    assert (third.length, third.kept, third.cached_tokens) == (8, 8, 8)
    assert third.boundaries == (12,)
    s.preempt(third)
    assert (third.length, third.kept, third.boundaries) == (0, 0, ())


@pytest.mark.parametrize(
    ("count", "chunk", "expected"),
    [
        (0, 100, [(0, 14, -1, 0)]),  # no room for any: nothing to stop for
        (4, 12, [(0, 12, -1, 0), (12, 2, -1, 0)]),  # kept where the forward ends, by copying
        (4, 13, [(0, 13, 2, 12), (13, 1, -1, 0)]),
        (4, 8, [(0, 8, -1, 0), (8, 6, 2, 4)]),
    ],
)
def test_a_state_is_left_aside_by_whichever_chunk_passes_its_page(
    count: int, chunk: int, expected: list[tuple[int, int, int, int]]
) -> None:
    s = make(Checkpoints(2, count), chunk)
    r = request("r", list(range(14)))
    s.add(r)
    found = []
    while r.length < 14:
        (each,) = s.schedule().prefill
        found.append((each.start, each.count, each.kept_slot, each.kept_rows))
        r.length += each.count
    assert found == expected


def test_many_rows_are_rather_cut_than_gone_through_twice() -> None:
    s = make(Checkpoints(2, 4), chunk=4096, most=2048)
    r = request("r", [1] * 1030)
    s.add(r)
    (chunk,) = s.schedule().prefill
    assert (chunk.count, chunk.kept_slot) == (1028, -1)


def test_two_prompts_in_a_step_never_write_one_state() -> None:
    s = make(Checkpoints(2, 1))
    for first in (0, 20):
        s.add(request(str(first), list(range(first, first + 14))))
    assert sorted(chunk.kept_slot for chunk in s.schedule().prefill) == [-1, 2]


@pytest.mark.parametrize("chunk", [100, 18])
def test_of_prompts_that_begin_alike_one_leaves_its_state_and_no_other_makes_room_for_one(
    chunk: int,
) -> None:
    """Also where they do not run in one step: the first one's page is cached, and no other's."""
    kept = Checkpoints(2, 2)
    take(kept, 31)
    s = make(kept, chunk)
    first, second = request("a", list(range(14))), request("b", [*range(13), 99])
    s.add(first)
    s.add(second)
    chunks = s.schedule().prefill
    assert [c.count for c in chunks] == [14, min(14, chunk - 14)]
    kept.keep(first.pages[2], chunks[0].kept_slot)
    s.pool.register(first.tokens, first.pages, 0, 14)
    s.finish(first)
    if chunk == 18:
        second.length, second.registered = 4, 1
        chunks += s.schedule().prefill
        assert chunks[-1].count == 10
    assert all(c.kept_slot < 0 for c in chunks[1:])
    assert kept.deepest([31]) is not None


@pytest.mark.parametrize("length", [7, 8, 9])
def test_the_same_prompt_finds_its_state_whatever_its_length(length: int) -> None:
    kept = Checkpoints(2, 4)
    s = make(kept)
    for expected in (0, (length - 1) // SIZE * SIZE):
        r = request("r", list(range(length)))
        s.add(r)
        while r.length < r.prefill_end:
            (chunk,) = s.schedule().prefill
            assert r.cached_tokens == expected
            r.length += chunk.count
            s.pool.register(r.tokens, r.pages, r.registered, r.length)
            r.registered = max(r.registered, r.length // SIZE)
            if chunk.kept_slot >= 0:
                page = r.pages[(chunk.start + chunk.kept_rows) // SIZE - 1]
                kept.keep(page, chunk.kept_slot)
            if r.length in r.boundaries:
                take(kept, r.pages[r.length // SIZE - 1])
            kept.give_back()
        s.finish(r)


def first_pages(s: Scheduler, tokens: list[int]) -> list[int]:
    pages = s.pool.match(tokens)
    s.pool.release(pages)
    return pages
