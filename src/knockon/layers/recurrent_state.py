"""States of recurrent layers, by slot: what such a layer keeps of a request in place of pages.

Keys and values past a request's length are overwritten before anything reads them. A state cannot
be left to that: what it took in stays in it. So a block that is verified leaves the states where
they are and keeps what its rows would have done to them; once it is known how many of them stand,
:meth:`DeltaMemory.commit` takes those in.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from knockon.layers.delta_rule import DeltaInputs, delta_steps, replay
from knockon.layers.fused.conv_tail import write_tail_kernel
from knockon.layers.fused.delta_block import delta_block_kernel, replay_block_kernel
from knockon.layers.fused.dispatch import fuses
from knockon.layers.short_conv import ConvRows, inputs_before


class Kept(NamedTuple):
    """States that a forward leaves aside on its way, before the rows that follow change them.

    Attributes:
        slots: ``[B]`` int64, where each request's goes; no request's own.
        counts: ``[B]`` int64, after how many of its rows.
        cut: the same on the host, where that knows it and all requests have the same.
    """

    slots: Tensor
    counts: Tensor
    cut: int | None = None


class StateRows(NamedTuple):
    """Whose states the requests of one forward have.

    Attributes:
        slots: ``[B]`` int64, a row of every layer's states each.
        held: whether rows may yet be taken back: states stay, until they are committed.
        may_begin: whether some request's first row is its first at all, with nothing before it.
        counts: ``[B]`` int64, how many of the rows each request has; ``None`` for all. The others
            change nothing.
        kept: states to be left aside, of a forward of several rows that are not held; or ``None``.
    """

    slots: Tensor
    held: bool = False
    may_begin: bool = False
    counts: Tensor | None = None
    kept: Kept | None = None


class HeldBlock(NamedTuple):
    """What the rows of a verified block would do to the states.

    Attributes:
        k: ``[B, T, key_heads, key_dim]``. corrections: ``[B, T, value_heads, value_dim]``, which
            hold value, writing strength and all that the state said before.
        log_decay: ``[B, T, value_heads]``.
        conv: inputs of the convolution, and whose.
    """

    k: Tensor
    corrections: Tensor
    log_decay: Tensor
    conv: ConvRows


class DeltaMemory:
    """One gated delta net layer's states.

    Args:
        slots: how many.
        state_shape: ``(value_heads, key_dim, value_dim)`` on this rank.
        conv_shape: ``(K - 1, C)`` on this rank.
        dtype: of states. conv_dtype: of the convolution's inputs, the model's own.
    """

    def __init__(
        self,
        slots: int,
        state_shape: tuple[int, int, int],
        conv_shape: tuple[int, int],
        dtype: torch.dtype,
        conv_dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.state = torch.zeros((slots, *state_shape), dtype=dtype, device=device)
        self.conv = torch.zeros((slots, *conv_shape), dtype=conv_dtype, device=device)
        self._held: HeldBlock | None = None

    @property
    def num_bytes(self) -> int:
        """What the states take."""
        return self.state.nbytes + self.conv.nbytes

    def conv_rows(self, rows: StateRows, starts: Tensor, mixed: Tensor) -> ConvRows:
        """The convolution's inputs ``mixed [B, T, C]`` behind those that lie here.

        Args:
            starts: ``[B]`` int64, position of each request's first row.
        """
        return ConvRows(mixed, self.conv, rows.slots, starts if rows.may_begin else None)

    def states_before(self, rows: StateRows, starts: Tensor, wide: torch.dtype) -> Tensor:
        """States before each request's first row, zero before position 0: a copy in ``wide``.

        Args:
            starts: ``[B]`` int64, position of that row.

        Returns:
            ``[B, value_heads, key_dim, value_dim]``.
        """
        state = self.state.index_select(0, rows.slots).to(wide)
        if rows.may_begin:
            state.masked_fill_((starts == 0)[:, None, None, None], 0)
        return state

    def step(self, rows: StateRows, starts: Tensor, inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
        """Rows one after the other; states move on unless the rows are held.

        Returns:
            Outputs and corrections ``[B, T, value_heads, value_dim]``.
        """
        if fuses(inputs.v) and not rows.may_begin:
            return delta_block_kernel(inputs, self.state, rows.slots, write=not rows.held)
        state = self.states_before(rows, starts, inputs.v.dtype)
        out, corrections, state = delta_steps(inputs, state, self.state.dtype)
        if not rows.held:
            self.write_states(rows.slots, state)
        return out, corrections

    def write_states(self, slots: Tensor, state: Tensor) -> None:
        """Store states moved on."""
        self.state.index_copy_(0, slots, state.to(self.state.dtype))

    def write_inputs(self, slots: Tensor, conv: ConvRows, lengths: Tensor | int) -> None:
        """Store what the row after the first ``lengths [B]``, or so many of all, will read.

        Args:
            slots: the requests' own, or others' than any request's of these.
            conv: of this layer's :meth:`conv_rows`.
        """
        if fuses(conv.rows):
            write_tail_kernel(conv, lengths, slots)
        else:
            taps = self.conv.shape[1] + 1
            self.conv.index_copy_(0, slots, inputs_before(conv.joined(), lengths, taps))

    def hold(self, block: HeldBlock) -> None:
        """Keep what a block's rows would do, until :meth:`commit`."""
        self._held = block

    def commit(self, lengths: Tensor) -> None:
        """Take in the first ``lengths [B]`` rows of the block held, as the device knows them."""
        block, self._held = self._held, None
        if block is None:
            raise ValueError("no block is held")
        slots = block.conv.slots
        held = (block.k, block.corrections, block.log_decay, lengths)
        if fuses(block.corrections):
            replay_block_kernel(self.state, slots, *held)
        else:
            state = self.state.index_select(0, slots).to(block.corrections.dtype)
            self.write_states(slots, replay(state, *held, self.state.dtype))
        self.write_inputs(slots, block.conv, lengths)

    def copy(self, source: int, target: int) -> None:
        """One slot's states to another."""
        self.state[target] = self.state[source]
        self.conv[target] = self.conv[source]
