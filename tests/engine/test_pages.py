"""The page pool: a page is free, cached or held, never two of them; what is cached can be found."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from knockon.engine.pages import PagePool
from knockon.layers.attention import NULL_PAGE

SIZE = 2


def test_the_null_page_is_never_handed_out() -> None:
    pool = PagePool(5, SIZE)
    assert pool.usable == pool.available == 4
    pages = pool.allocate(4)
    assert pages is not None and sorted(pages) == [1, 2, 3, 4]
    assert NULL_PAGE not in pages


def test_too_many_pages_are_refused_and_nothing_changes() -> None:
    pool = PagePool(5, SIZE)
    assert pool.allocate(5) is None
    assert pool.available == 4
    assert pool.allocate(0) == []


@pytest.mark.parametrize(("positions", "pages"), [(0, 0), (1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_pages_for_rounds_up(positions: int, pages: int) -> None:
    assert PagePool(5, SIZE).pages_for(positions) == pages


def test_only_full_pages_are_matched_and_only_whole_runs() -> None:
    pool = PagePool(9, SIZE)
    pages = pool.allocate(3)
    assert pages is not None
    pool.register([1, 2, 3, 4, 5], pages)
    assert pool.match([1, 2, 3, 4, 5, 6]) == pages[:2]
    assert pool.match([1, 2, 3]) == pages[:1]
    assert pool.match([1]) == []
    assert pool.match([1, 9, 3, 4]) == []
    assert pool.match([3, 4]) == []  # the run is there, but not at the start


def test_of_a_longer_output_what_is_written_is_offered_page_by_page() -> None:
    pool = PagePool(9, SIZE)
    pages = pool.allocate(4)
    assert pages is not None
    tokens = [1, 2, 3, 4, 5, 6, 7]
    pool.register(tokens, pages, written=3)
    assert pool.match(tokens) == pages[:1]
    pool.register(tokens, pages, first=1, written=6)
    assert pool.match(tokens) == pages[:3]


def test_a_second_page_of_the_same_run_stays_out_and_so_does_what_follows() -> None:
    pool = PagePool(9, SIZE)
    first, second = pool.allocate(1), pool.allocate(2)
    assert first is not None and second is not None
    pool.register([1, 2], first)
    pool.register([1, 2, 3, 4], second)
    assert pool.match([1, 2, 3, 4]) == first
    pool.register([1, 2, 3, 4], second, first=1)  # as a request goes on where it has been
    assert pool.match([1, 2, 3, 4]) == first


def test_leaves_are_evicted_before_roots_and_the_longest_idle_first() -> None:
    pool = PagePool(6, SIZE)
    old, new = pool.allocate(3), pool.allocate(2)
    assert old is not None and new is not None
    pool.register([1, 2, 3, 4, 5, 6], old)
    pool.register([7, 8, 9, 10], new)
    pool.release(old)
    pool.release(new)
    assert pool.available == 5
    taken = pool.allocate(1)
    assert taken == [old[2]]
    found = pool.match([1, 2, 3, 4, 5, 6])
    assert found == old[:2]
    pool.release(found)
    assert pool.allocate(2) == [new[1], new[0]]


def test_a_page_held_by_a_match_is_not_evicted() -> None:
    pool = PagePool(3, SIZE)
    pages = pool.allocate(2)
    assert pages is not None
    pool.register([1, 2, 3, 4], pages)
    pool.release(pages)
    assert pool.match([1, 2, 9]) == pages[:1]
    assert pool.available == 1
    assert pool.allocate(2) is None
    assert pool.allocate(1) == pages[1:]


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    pool = PagePool(4, SIZE, prefix_cache=False)
    pages = pool.allocate(2)
    assert pages is not None
    pool.register([1, 2, 3, 4], pages)
    pool.release(pages)
    assert pool.match([1, 2, 3, 4]) == []
    assert pool.available == 3


class Sequence:
    """A request as the pool sees it: tokens whose KV is written, pages, how many were offered."""

    def __init__(self, tokens: list[int], pages: list[int], matched: int) -> None:
        self.tokens, self.pages, self.registered = tokens, pages, matched


class PagePoolMachine(RuleBasedStateMachine):
    """Requests come with prompts that share beginnings, grow, are offered and leave.

    ``written`` is what a reader would find in every page: the tokens from the start of the sequence
    to the page's end, put down by whoever was first to be handed the page.
    """

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(8, SIZE)
        self.live: list[Sequence] = []
        self.written: dict[int, tuple[int, ...]] = {}

    @rule(target=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def admit(self, tokens: list[int]) -> Sequence | None:
        pool, before = self.pool, self.pool.available
        matched = pool.match(tokens[:-1])
        for i, page in enumerate(matched):
            assert self.written[page] == tuple(tokens[: (i + 1) * SIZE])
        count = pool.pages_for(len(tokens)) - len(matched)
        possible = count <= pool.available
        pages = pool.allocate(count)
        assert (pages is not None) == possible
        if pages is None:
            pool.release(matched)
            assert pool.available == before
            return None
        sequence = Sequence(tokens, matched + pages, len(matched))
        self._write(sequence, len(matched))
        self.live.append(sequence)
        return sequence

    @rule(sequence=sequences, more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def grow(self, sequence: Sequence | None, more: list[int]) -> None:
        if sequence not in self.live or sequence is None:
            return
        missing = self.pool.pages_for(len(sequence.tokens) + len(more)) - len(sequence.pages)
        pages = self.pool.allocate(missing)
        if pages is None:
            return
        first = len(sequence.tokens) // SIZE
        sequence.tokens = sequence.tokens + more
        sequence.pages = sequence.pages + pages
        self._write(sequence, first)

    @rule(sequence=sequences)
    def offer(self, sequence: Sequence | None) -> None:
        if sequence not in self.live or sequence is None:
            return
        full = len(sequence.tokens) // SIZE
        self.pool.register(sequence.tokens[: full * SIZE], sequence.pages, sequence.registered)
        sequence.registered = max(full, sequence.registered)
        found = self.pool.match(sequence.tokens)
        # Everything offered is found, unless another's equal page came first and ended the offer;
        # that one may have gone since, and then what was offered behind it was never taken.
        own = found == sequence.pages[: len(found)]
        assert len(found) == full or not own or not self.pool.is_cached(sequence.pages[len(found)])
        for i, page in enumerate(found):
            assert self.written[page] == tuple(sequence.tokens[: (i + 1) * SIZE])
        self.pool.release(found)

    @rule(sequence=consumes(sequences))
    def leave(self, sequence: Sequence | None) -> None:
        if sequence not in self.live or sequence is None:
            return
        self.live.remove(sequence)
        self.pool.release(sequence.pages)

    def _write(self, sequence: Sequence, first: int) -> None:
        for i, page in enumerate(sequence.pages[first:], start=first):
            self.written[page] = tuple(sequence.tokens[: (i + 1) * SIZE])

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        pool = self.pool
        free, idle = list(pool._free), list(pool._idle)
        holders = [0] * pool.num_pages
        for sequence in self.live:
            assert len(set(sequence.pages)) == len(sequence.pages)
            for page in sequence.pages:
                holders[page] += 1
        assert holders == pool._holders
        held = [page for page, count in enumerate(holders) if count]
        assert sorted(free + idle + held) == list(range(1, pool.num_pages))
        assert pool.available == len(free) + len(idle)

    @invariant()
    def a_page_in_two_hands_was_matched(self) -> None:
        for page in range(1, self.pool.num_pages):
            readers = [s for s in self.live if page in s.pages]
            if len(readers) > 1:
                places = {s.pages.index(page) for s in readers}
                assert len(places) == 1
                end = (places.pop() + 1) * SIZE
                assert len({tuple(s.tokens[:end]) for s in readers}) == 1

    @invariant()
    def the_trie_hangs_together(self) -> None:
        children = dict.fromkeys(self.pool._by_page, 0)
        for (parent, run), node in self.pool._by_key.items():
            assert self.pool._by_page[node.page] is node and node.key == (parent, run)
            if parent != NULL_PAGE:
                children[parent] += 1
        assert children == {page: node.children for page, node in self.pool._by_page.items()}


TestPagePool = PagePoolMachine.TestCase
TestPagePool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_flush_forgets_what_nobody_holds_and_nothing_else() -> None:
    pool = PagePool(9, SIZE)
    first, second = pool.allocate(2), pool.allocate(2)
    assert first is not None and second is not None
    pool.register([1, 2, 3, 4], first)
    pool.register([5, 6, 7, 8], second)
    pool.release(first)
    assert pool.cached == 2
    assert pool.flush() == 2
    assert pool.cached == 0
    assert pool.match([1, 2, 3, 4]) == []
    assert pool.match([5, 6, 7, 8]) == second
    assert pool.available == pool.usable - len(second)
