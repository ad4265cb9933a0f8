"""States kept at page boundaries, so that a cached prefix can be gone on from.

Pages hold keys and values of every position, states only what came of all of them together. So a
prefix found in cached pages is of use to recurrent layers up to its last *checkpoint*: their state
after the last position of a page, kept under that page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class Found(NamedTuple):
    """Where a prefix can be gone on from: after so many pages, from the state kept at ``slot``."""

    pages: int
    slot: int


class Checkpoints:
    """Hands out states for keeping; the one longest unused gives way.

    Args:
        first: slot of the first state that may be used.
        count: how many.
    """

    def __init__(self, first: int, count: int) -> None:
        self.count = count
        self._free = list(range(first + count - 1, first - 1, -1))
        self._by_page: OrderedDict[int, int] = OrderedDict()  # longest unused first
        self._reserved: list[int] = []

    @property
    def kept(self) -> int:
        """How many are in use."""
        return len(self._by_page)

    def deepest(self, pages: Sequence[int]) -> Found | None:
        """The last checkpoint along a prefix's pages, which counts as used."""
        for count in range(len(pages), 0, -1):
            slot = self._by_page.get(pages[count - 1])
            if slot is not None:
                self._by_page.move_to_end(pages[count - 1])
                return Found(count, slot)
        return None

    def reserve(self, page: int) -> int | None:
        """A state to be written, before it is known whether that is done or its page cached.

        Until :meth:`keep` or :meth:`give_back` it is found under no page, nor given to another.

        Returns:
            ``None`` where the page has one, or none can be kept.
        """
        if page in self._by_page or not (self._free or self._by_page):
            return None
        if not self._free:
            self._free.append(self._by_page.popitem(last=False)[1])
        self._reserved.append(self._free.pop())
        return self._reserved[-1]

    def keep(self, page: int, slot: int) -> None:
        """Let a reserved state be found under a page, unless that has one."""
        if page not in self._by_page:
            self._reserved.remove(slot)
            self._by_page[page] = slot

    def give_back(self) -> None:
        """Let all that is still reserved be used for something else."""
        while self._reserved:  # one by one: an interrupt may lose one, but give none out twice
            self._free.append(self._reserved.pop())

    def drop(self, page: int) -> None:
        """Forget what was kept under a page, which is cached no more."""
        slot = self._by_page.pop(page, None)
        if slot is not None:
            self._free.append(slot)
