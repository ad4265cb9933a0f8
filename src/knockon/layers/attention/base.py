"""What every attention backend shares: paged KV, the plan of one forward, what a row may see."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# A context is padded to a multiple of this. Attention then adds up a row's keys in the same order
# however many rows stand in the block, so that one row and a block of them round alike.
CONTEXT_MULTIPLE = 64
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


class Visibility(NamedTuple):
    """Which keys a row may see.

    Attributes:
        causal: only positions up to the row's own; else the whole context and the whole block.
        window: only positions ``>= row - (window - 1)``; ``None`` for no such limit.
    """

    causal: bool
    window: int | None = None


CAUSAL = Visibility(True)


@dataclass
class BlockPlan:
    """Where the ``T`` rows of each of ``B`` requests stand in one forward, and what they read.

    Attributes:
        positions: ``[B, T]`` int64, absolute position of each row.
        slots: ``[B * T]`` int64, the KV slot that each row is written to.
        context_slots: ``[B, C]`` int64, the KV slots of positions ``0 .. C-1``; ``C`` is a multiple
            of ``CONTEXT_MULTIPLE``, and what lies past a request's own rows is never seen.
    """

    positions: Tensor
    slots: Tensor
    context_slots: Tensor
    _biases: dict[tuple[Visibility, int, torch.dtype], Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """``T``, rows per request."""
        return self.positions.shape[1]

    def bias(self, visibility: Visibility, repeat: int, dtype: torch.dtype) -> Tensor:
        """What is added to the scores: ``[B, 1, T * repeat, C]``, 0 where seen and -inf elsewhere.

        Made once per forward and shared by the layers.

        Args:
            repeat: query heads folded under each row.
        """
        key = (visibility, repeat, dtype)
        if key not in self._biases:
            self._biases[key] = self._make_bias(visibility, repeat, dtype)
        return self._biases[key]

    def _make_bias(self, visibility: Visibility, repeat: int, dtype: torch.dtype) -> Tensor:
        context = self.context_slots.shape[1]
        keys = torch.arange(context, device=self.positions.device)
        rows = self.positions.unsqueeze(-1)
        last = rows if visibility.causal else rows[:, -1:]
        seen = keys <= last
        if visibility.window is not None:
            seen = seen & (keys > rows - visibility.window)
        seen = seen.expand(-1, self.rows, -1)
        bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        bias = bias.masked_fill_(~seen, float("-inf"))
        return bias.repeat_interleave(repeat, dim=1).unsqueeze(1)


def plan_block(
    page_table: Tensor,
    page_size: int,
    starts: Tensor,
    rows: int,
    context: int,
    valid: Tensor | None = None,
) -> BlockPlan:
    """Plan a forward of ``rows`` rows per request from page tables; no host read.

    Args:
        page_table: ``[B, P]`` int64 page numbers; entries past a request's pages are the null page.
        page_size: positions per page.
        starts: ``[B]`` int64, position of each request's first row.
        rows: ``T``.
        context: a host-known bound on ``starts + rows``.
        valid: ``[B]`` int64, rows that are real; later ones are written to the null page.
    """
    offsets = torch.arange(rows, device=starts.device)
    positions = starts.unsqueeze(1) + offsets
    pages = positions // page_size
    held = pages < page_table.shape[1]
    page = page_table.gather(1, pages.clamp(max=page_table.shape[1] - 1))
    if valid is not None:
        held = held & (offsets < valid.unsqueeze(1))
    slots = page.where(held, NULL_PAGE) * page_size + positions % page_size
    keys = torch.arange(-(-context // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE, device=starts.device)
    key_pages = keys // page_size
    table = page_table[:, key_pages.clamp(max=page_table.shape[1] - 1)]
    # A key past the table is past every request's rows: any slot will do, since none is seen.
    context_slots = table * page_size + keys % page_size
    return BlockPlan(positions, slots.flatten(), context_slots)


class AttentionBackend(Protocol):
    """Writes a block's keys and values and attends from its rows to the context and the block."""

    name: str

    def write(self, k: Tensor, v: Tensor, kv: PagedKV, plan: BlockPlan) -> None:
        """Store ``k, v [B, T, kv_heads, head_dim]`` at ``plan.slots``."""
        ...

    def attend(self, q: Tensor, kv: PagedKV, plan: BlockPlan, visibility: Visibility) -> Tensor:
        """``q [B, T, heads, head_dim]`` to ``[B, T, heads * head_dim]``; scale 1/sqrt(head_dim)."""
        ...
