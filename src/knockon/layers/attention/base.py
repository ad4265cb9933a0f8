"""What every attention backend shares: paged KV, the plan of one forward, what a row may see."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from knockon.layers.fused.plan_rows import plan_rows
from knockon.layers.recurrent_state import StateRows

# A token decoded alone and one inside a block must round alike, so a row has to meet the same
# number of keys either way: that sets the order in which a CPU's kernels add them up. A lone
# request's rows are taken in segments, each over its own positions rounded up to the first number.
# In a batch, where lengths differ, the context is rounded up to the second, the keys that SDPA
# takes at a time.
LONE_MULTIPLE = 64
BATCH_MULTIPLE = 512
FP8 = torch.float8_e4m3fn
NULL_PAGE = 0  # the page that padding rows and rows past the context limit are written to


class PagedKV(NamedTuple):
    """One layer's keys and values, ``[num_pages * page_size, kv_heads, head_dim]`` each."""

    k: Tensor
    v: Tensor

    @classmethod
    def allocate(
        cls,
        num_slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> PagedKV:
        """Zeros, since a masked row of uninitialised memory may hold NaN, and 0 · NaN is NaN."""
        shape = (num_slots, kv_heads, head_dim)
        return cls(
            torch.zeros(shape, dtype=dtype, device=device),
            torch.zeros(shape, dtype=dtype, device=device),
        )

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store ``k, v [B, T, kv_heads, head_dim]`` at ``slots [B * T]``."""
        for pages, rows in ((self.k, k.flatten(0, 1)), (self.v, v.flatten(0, 1))):
            if pages.dtype == FP8:
                pages.view(torch.uint8).index_copy_(0, slots, to_fp8(rows).view(torch.uint8))
            else:
                pages.index_copy_(0, slots, rows)

    def read(self, slots: Tensor | slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values ``[N, kv_heads, head_dim]`` of some slots."""
        if isinstance(slots, slice):
            return self.k[slots].to(dtype), self.v[slots].to(dtype)
        if self.k.dtype == FP8:
            found = [pages.view(torch.uint8).index_select(0, slots).view(FP8) for pages in self]
            return found[0].to(dtype), found[1].to(dtype)
        return self.k.index_select(0, slots), self.v.index_select(0, slots)


def to_fp8(x: Tensor) -> Tensor:
    """``x`` rounded to E4M3, whose largest number, 448, stands for all beyond."""
    return x.clamp(-448.0, 448.0).to(FP8)


class Visibility(NamedTuple):
    """Which keys a row may see.

    Attributes:
        causal: only positions up to the row's own; else the whole context and the whole block.
        window: only positions ``>= row - (window - 1)``; ``None`` for no such limit.
        first: only positions from here on, and the row's own.
    """

    causal: bool
    window: int | None = None
    first: int = 0


class Segment(NamedTuple):
    """Rows ``[first, last)`` of every request; they see keys of the first ``context`` positions."""

    first: int
    last: int
    context: int


@dataclass
class BlockPlan:
    """Where the ``T`` rows of each of ``B`` requests stand in one forward, and what they read.

    Attributes:
        positions: ``[B, T]`` int64, absolute position of each row.
        slots: ``[B * T]`` int64, the KV slot that each row is written to.
        page_table: ``[B, P]`` integers, the page of each run of ``page_size`` positions.
        page_size: positions a page.
        segments: the rows, cut where causal ones need more of the context; empty where the host
            knows no bound on it, which only backends that read lengths on the device can run.
        first_slot: known on the host, for one request whose pages follow each other: its context
            lies in the slots from here on and can be read in place.
        states: whose states the requests have, for a model with recurrent layers.
    """

    positions: Tensor
    slots: Tensor
    page_table: Tensor
    page_size: int
    segments: tuple[Segment, ...] = ()
    first_slot: int | None = None
    states: StateRows | None = None
    _biases: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    @property
    def context(self) -> int:
        """``C``, the host's bound on the positions that any row may see."""
        if not self.segments:
            raise ValueError("this plan was made without a bound on the context")
        return self.segments[-1].context

    @cached_property
    def context_slots(self) -> Tensor:
        """``[B, C]`` int64, the KV slots of positions ``0 .. C-1``.

        A key past the table is past every request's rows: any slot will do, since none is seen.
        """
        keys = torch.arange(self.context, device=self.positions.device)
        pages = (keys // self.page_size).clamp(max=self.page_table.shape[1] - 1)
        return self.page_table[:, pages] * self.page_size + keys % self.page_size

    @property
    def rows(self) -> int:
        """``T``, rows per request."""
        return self.positions.shape[1]

    @property
    def whole(self) -> Segment:
        """All rows over all of the context."""
        return Segment(0, self.rows, self.context)

    def single_rows(self) -> list[BlockPlan]:
        """The plan of each row by itself, for those who run a block's rows one after the other."""
        positions = self.positions.t().contiguous().unsqueeze(-1)
        slots = self.slots.view(self.positions.shape).t().contiguous()
        plans = []
        for row in range(self.rows):
            held = [s.context for s in self.segments if s.first <= row < s.last]
            plans.append(
                BlockPlan(
                    positions[row],
                    slots[row],
                    self.page_table,
                    self.page_size,
                    tuple(Segment(0, 1, context) for context in held),
                    self.first_slot,
                )
            )
        return plans

    def bias(
        self, segment: Segment, visibility: Visibility, repeat: int, dtype: torch.dtype
    ) -> Tensor:
        """What is added to a segment's scores: 0 where a row sees a key and -inf elsewhere.

        Made once per forward and shared by the layers.

        Args:
            repeat: query heads folded under each row.

        Returns:
            ``[B, 1, (last - first) * repeat, context]``.
        """
        key = (segment, visibility, repeat, dtype)
        if key not in self._biases:
            self._biases[key] = self._make_bias(segment, visibility, repeat, dtype)
        return self._biases[key]

    def _make_bias(
        self, segment: Segment, visibility: Visibility, repeat: int, dtype: torch.dtype
    ) -> Tensor:
        keys = torch.arange(segment.context, device=self.positions.device)
        rows = self.positions[:, segment.first : segment.last].unsqueeze(-1)
        last = rows if visibility.causal else self.positions[:, -1:, None]
        seen = keys <= last
        if visibility.window is not None:
            seen = seen & (keys > rows - visibility.window)
        if visibility.first:
            seen = seen & (keys >= rows.clamp(max=visibility.first))
        seen = seen.expand(-1, rows.shape[1], -1)
        bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        bias = bias.masked_fill_(~seen, float("-inf"))
        return bias.repeat_interleave(repeat, dim=1).unsqueeze(1)


def plan_block(
    page_table: Tensor,
    page_size: int,
    starts: Tensor,
    rows: int,
    context: int | None = None,
    first_slot: int | None = None,
    counts: Tensor | None = None,
    states: StateRows | None = None,
) -> BlockPlan:
    """Plan a forward of ``rows`` rows per request from page tables; no host read.

    Args:
        page_table: ``[B, P]`` integer page numbers; entries past a request's pages are the null
            page.
        page_size: positions per page.
        starts: ``[B]`` int64, position of each request's first row.
        rows: ``T``.
        context: a host-known bound on ``starts + rows``, ``None`` without one.
        first_slot: see :class:`BlockPlan`.
        counts: ``[B]`` int64, how many of the ``T`` rows each request has; by default all. The
            others repeat its first position and are written to the null page.
        states: see :class:`BlockPlan`.
    """
    positions, slots = plan_rows(page_table, page_size, starts, rows, counts, NULL_PAGE)
    segments = () if context is None else cut(rows, context, lone=len(page_table) == 1)
    return BlockPlan(positions, slots, page_table, page_size, segments, first_slot, states)


def cut(rows: int, context: int, lone: bool) -> tuple[Segment, ...]:
    """The segments of a block whose last row stands at position ``context - 1`` at most.

    Args:
        lone: whether it is one request's, so that all its positions are known on the host.
    """
    if not lone:
        return (Segment(0, rows, -(-context // BATCH_MULTIPLE) * BATCH_MULTIPLE),)
    segments = []
    start, first = context - rows, 0
    while first < rows:
        reach = ((start + first) // LONE_MULTIPLE + 1) * LONE_MULTIPLE
        last = min(rows, reach - start)
        segments.append(Segment(first, last, reach))
        first = last
    return tuple(segments)


class AttentionBackend(Protocol):
    """Writes a block's keys and values and attends from its rows to the context and the block.

    Attributes:
        reads_lengths: whether it takes the context's length from the plan's positions, on the
            device, and so runs plans made without a bound on it.
    """

    name: str
    reads_lengths: bool

    def write(self, k: Tensor, v: Tensor, kv: PagedKV, plan: BlockPlan) -> None:
        """Store ``k, v [B, T, kv_heads, head_dim]`` at ``plan.slots``."""
        ...

    def attend(self, q: Tensor, kv: PagedKV, plan: BlockPlan, visibility: Visibility) -> Tensor:
        """``q [B, T, heads, head_dim]`` to ``[B, T, heads * head_dim]``; scale 1/sqrt(head_dim)."""
        ...
