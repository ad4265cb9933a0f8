"""How long the parts of a decode step take, where each runs to its end before the next begins."""

from __future__ import annotations

import time

PARTS = ("draft", "verify", "commit")
"""Proposals; the target's forward, drawing and accepting; the drafter's own KV."""


class PartTimes:
    """Times the parts of one step, in the order of :data:`PARTS`.

    Attributes:
        seconds: of each part that has ended.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = time.perf_counter()

    def part_ended(self) -> None:
        """The next part begins here."""
        now = time.perf_counter()
        self.seconds.append(now - self._began)
        self._began = now
