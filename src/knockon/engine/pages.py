"""KV pages: who holds which, and which full pages of earlier requests can be used again.

A page holds ``page_size`` positions of the target's KV *and* of the drafter's, so a page found in
the prefix cache brings the draft context along. A page enters the cache only once both have been
written for every position in it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from knockon.engine.checkpoints import Checkpoints
from knockon.layers.attention import NULL_PAGE


@dataclass
class _Cached:
    """A cached page: a node of the trie of page-sized token runs."""

    page: int
    key: tuple[int, tuple[int, ...]]
    children: int = 0


class PagePool:
    """Hands out pages, counts their holders and keeps full ones for later prompts.

    Args:
        num_pages: pages in all, the null page included.
        page_size: positions a page.
        prefix_cache: whether full pages are kept and matched.
        checkpoints: states kept under pages, which go with them.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        prefix_cache: bool = True,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.prefix_cache = prefix_cache
        self.checkpoints = checkpoints
        self._free: deque[int] = deque(p for p in range(num_pages) if p != NULL_PAGE)
        self._holders = [0] * num_pages
        self._by_key: dict[tuple[int, tuple[int, ...]], _Cached] = {}
        self._by_page: dict[int, _Cached] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, held by nobody; oldest first

    @property
    def available(self) -> int:
        """Pages that :meth:`allocate` could hand out now."""
        return len(self._free) + len(self._idle)

    @property
    def usable(self) -> int:
        """Pages there are besides the null page."""
        return self.num_pages - 1

    @property
    def cached(self) -> int:
        """Pages held by nobody that are kept for later prompts."""
        return len(self._idle)

    def flush(self) -> int:
        """Forget every cached page that no request holds; how many there were."""
        count = len(self._idle)
        while self._idle:
            self._evict()
        return count

    def pages_for(self, positions: int) -> int:
        """Pages needed to hold that many positions."""
        return -(-positions // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages held once each, or ``None`` and no change if there are too few."""
        if count > self.available:
            return None
        while len(self._free) < count:
            self._evict()
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give up one hold on each page; deepest first, so that leaves are evicted before roots."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._by_page:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Cached pages that hold the longest run of full pages at the start of ``tokens``.

        The pages returned are held; the caller releases them.
        """
        pages: list[int] = []
        if not self.prefix_cache:
            return pages
        parent = NULL_PAGE
        for run in self._runs(tokens):
            node = self._by_key.get((parent, run))
            if node is None:
                break
            parent = node.page
            pages.append(node.page)
            self._holders[node.page] += 1
            self._idle.pop(node.page, None)
        return pages

    def is_cached(self, page: int) -> bool:
        """Whether later prompts can find a page."""
        return page in self._by_page

    def register(
        self,
        tokens: Sequence[int],
        pages: Sequence[int],
        first: int = 0,
        written: int | None = None,
    ) -> None:
        """Offer the full pages of ``tokens`` for reuse, from page index ``first`` on.

        A run that is cached already under another page stays there, and nothing below it is
        registered twice.

        Args:
            written: how many of the tokens have their target and draft KV written; without it all.
        """
        if not self.prefix_cache:
            return
        parent = NULL_PAGE if first == 0 else pages[first - 1]
        if first and parent not in self._by_page:
            return
        for index, run in enumerate(self._runs(tokens, first, written), first):
            page, key = pages[index], (parent, run)
            if key in self._by_key:
                if self._by_key[key].page != page:
                    return
            else:
                node = _Cached(page, key)
                self._by_key[key] = self._by_page[page] = node
                if parent != NULL_PAGE:
                    self._by_page[parent].children += 1
            parent = page

    def would_cache(self, tokens: Sequence[int], pages: Sequence[int], first: int = 0) -> bool:
        """Whether :meth:`register` would have the last full page of ``tokens`` found.

        Not if some of them are cached under another's pages.
        """
        if not self.prefix_cache:
            return False
        parent = NULL_PAGE if first == 0 else pages[first - 1]
        if first and parent not in self._by_page:
            return False
        for index, run in enumerate(self._runs(tokens, first), first):
            node = self._by_key.get((parent, run))
            if node is None:
                return True
            if node.page != pages[index]:
                return False
            parent = node.page
        return True

    def _runs(
        self, tokens: Sequence[int], first: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, ...]]:
        size = self.page_size
        end = len(tokens) if end is None else end
        for start in range(first * size, end - size + 1, size):
            yield tuple(tokens[start : start + size])

    def _evict(self) -> None:
        """Drop the page longest idle that no cached page continues."""
        page = next(p for p in self._idle if self._by_page[p].children == 0)
        del self._idle[page]
        node = self._by_page.pop(page)
        if self.checkpoints is not None:
            self.checkpoints.drop(page)
        del self._by_key[node.key]
        parent = node.key[0]
        if parent != NULL_PAGE:
            self._by_page[parent].children -= 1
        self._free.append(page)
