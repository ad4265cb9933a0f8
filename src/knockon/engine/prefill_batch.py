"""Prompt chunks that are run together: which, and how they are laid out as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from knockon.engine.graphs import PrefillKey, together
from knockon.engine.step import PrefillChunk
from knockon.layers.recurrent_state import Kept, StateRows


class PrefillRows(NamedTuple):
    """Where the requests of a prefill stand: all that a graph of it reads, but for the tokens.

    Each int64 ``[n]`` on the device.

    Attributes:
        slots: theirs. starts: position of the first row. counts: how many rows are theirs.
        kept_slots, kept_rows: where, and after how many rows, states are left aside.
    """

    slots: Tensor
    starts: Tensor
    counts: Tensor
    kept_slots: Tensor
    kept_rows: Tensor

    def states(self, ragged: bool, keeps: bool, cut: int | None) -> StateRows:
        """Whose states the rows have.

        Args:
            ragged: whether ``counts`` are not all of the rows.
            keeps: whether any state is left aside.
            cut: what ``kept_rows`` all are, if the host knows.
        """
        kept = Kept(self.kept_slots, self.kept_rows, cut) if keeps else None
        counts = self.counts if ragged else None
        return StateRows(self.slots, may_begin=True, counts=counts, kept=kept)


def idle_row(idle: int) -> tuple[int, int, int, int, int]:
    """A :class:`PrefillRows` row of nobody: one row, in the idle slot."""
    return idle, 0, 1, idle, 0


def alike(chunks: Sequence[PrefillChunk], most: int = 0) -> list[list[PrefillChunk]]:
    """Chunks to be run together: the shortest of a group has half the rows of the longest or more.

    Longest first, so at most half of a group's rows are padding.

    Args:
        most: rows of the largest graph; 0 for groups of any size, which need none.
    """
    groups: list[list[PrefillChunk]] = []
    left = sorted(chunks, key=lambda chunk: -chunk.count)
    while left:
        longest = left[0].count
        near = [chunk.count for chunk in left if 2 * chunk.count >= longest]
        count = together(near, most)
        groups.append(left[:count])
        left = left[count:]
    return groups


def cut_of(chunks: Sequence[PrefillChunk]) -> int | None:
    """After how many rows all of these leave a state aside; ``None`` if they differ in it."""
    cuts = {chunk.kept_rows for chunk in chunks}
    return cuts.pop() or None if len(cuts) == 1 else None


def lay_out(
    chunks: Sequence[PrefillChunk], shape: PrefillKey, idle: int
) -> tuple[list[tuple[int, int, int, int, int]], list[list[int]]]:
    """The :class:`PrefillRows` row of each request of a padded prefill, and its rows' tokens.

    Requests that are only padding have one row, in the idle slot; states that nobody wants left
    aside go there too.
    """
    where = []
    for chunk in chunks:
        aside = (idle, 0) if chunk.kept_slot < 0 else (chunk.kept_slot, chunk.kept_rows)
        where.append((chunk.request.slot, chunk.start, chunk.count, *aside))
    rows = [
        chunk.request.tokens[chunk.start : chunk.start + chunk.count]
        + [0] * (shape.rows - chunk.count)
        for chunk in chunks
    ]
    missing = shape.requests - len(chunks)
    return where + [idle_row(idle)] * missing, rows + [[0] * shape.rows] * missing
