"""A verified block through the gated delta rule, and its accepted rows into the states.

One program holds a slice of one head's state in registers and takes the rows one after the other,
so a state is read once a block, in place, and written once by whoever keeps it. The next two rows
are copied to shared memory meanwhile (``num_stages``, whose loads are whole vectors; numbers are
asked for by hand): a row's time is then that of its sums, not of memory.
The replay repeats the block's own operations, products and sums rounded alike, so its states have
the bits that the rows alone would have left.
"""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from knockon.layers.delta_rule import DeltaInputs
from knockon.layers.fused.pdl import follow, pdl
from knockon.triton_backend import jit, power_of_two, tl


class Slice(NamedTuple):
    """What of a head's state a program holds.

    How sums over keys are added up depends on both, and so do a row's last bits: single rows and
    blocks must be run with the same. A replay has no sums, and any leaves the same bits.

    Attributes:
        values: columns; a power of two.
        warps: that share them.
    """

    values: int
    warps: int


SLICE = Slice(values=32, warps=1)  # both: benchmarks/results/delta_block.json
REPLAYED = Slice(values=16, warps=1)


def delta_block_kernel(
    inputs: DeltaInputs, states: Tensor, slots: Tensor, write: bool, held: Slice = SLICE
) -> tuple[Tensor, Tensor]:
    """:func:`~knockon.layers.delta_rule.delta_steps` from states where they lie.

    Args:
        inputs: FP32.
        states: ``[S, value_heads, key_dim, value_dim]``.
        slots: ``[B]`` int64, whose states.
        write: whether the last states are stored.
        held: by each program.

    Returns:
        Outputs and corrections, both ``[B, T, value_heads, value_dim]``.
    """
    q, k, v, log_decay, beta = (x.contiguous() for x in inputs)
    out, corrections = torch.empty_like(v), torch.empty_like(v)
    batch, rows, heads, dim = v.shape
    values = min(held.values, power_of_two(dim))
    if v.numel():
        run_rows[(-(-dim // values), heads, batch)](
            q,
            k,
            v,
            log_decay,
            beta,
            states,
            slots.contiguous(),
            out,
            corrections,
            rows,
            k.shape[2],
            heads,
            k.shape[3],
            dim,
            int(write),
            KEYS=power_of_two(k.shape[3]),
            VALUES=values,
            num_warps=held.warps,
            **pdl(v),
        )
    return out, corrections


def replay_block_kernel(
    states: Tensor,
    slots: Tensor,
    k: Tensor,
    corrections: Tensor,
    log_decay: Tensor,
    lengths: Tensor,
    held: Slice = REPLAYED,
) -> None:
    """:func:`~knockon.layers.delta_rule.replay` of states where they lie."""
    batch, rows, heads, dim = corrections.shape
    values = min(held.values, power_of_two(dim))
    if corrections.numel():
        replay_rows[(-(-dim // values), heads, batch)](
            k.contiguous(),
            corrections,
            log_decay.contiguous(),
            lengths.contiguous(),
            states,
            slots.contiguous(),
            rows,
            k.shape[2],
            heads,
            k.shape[3],
            dim,
            KEYS=power_of_two(k.shape[3]),
            VALUES=values,
            num_warps=held.warps,
            **pdl(corrections),
        )


# A block, a single row and one whose states are kept must be one program: which product of a sum
# the compiler adds unrounded is its choice, and made anew for every variant. So nothing that
# differs between them is a constant to it, nor how small tensors are aligned.
@jit(
    do_not_specialize=["rows", "write"],
    do_not_specialize_on_alignment=[
        "q",
        "k",
        "v",
        "log_decay",
        "beta",
        "slots",
        "out",
        "corrections",
    ],
)
def run_rows(
    q,
    k,
    v,
    log_decay,
    beta,
    states,
    slots,
    out,
    corrections,
    rows,
    key_heads,
    value_heads,
    key_dim,
    value_dim,
    write,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some columns of one head's state of one request, through all rows."""
    follow(PDL)
    request, head, key, value = slice_of_program(KEYS, VALUES)
    key_live, value_live = key < key_dim, value < value_dim
    live = key_live[:, None] & value_live[None, :]
    home = home_of(states, slots, request, head, key, value, value_heads, key_dim, value_dim)
    state = tl.load(home, mask=live, other=0.0).to(tl.float32)
    key_head = head // (value_heads // key_heads)
    first = request * rows
    at_head = first * value_heads + head
    next_decay, next_beta = tl.load(log_decay + at_head), tl.load(beta + at_head)
    for t in tl.range(rows, num_stages=3):
        at_head = (first + t) * value_heads + head
        at_key = ((first + t) * key_heads + key_head) * key_dim + key
        at_value = at_head * value_dim + value
        keys = tl.load(k + at_key, mask=key_live, other=0.0)[:, None]
        queries = tl.load(q + at_key, mask=key_live, other=0.0)[:, None]
        read = tl.load(v + at_value, mask=value_live, other=0.0)
        decay, strength = next_decay, next_beta
        ahead = (first + tl.minimum(t + 1, rows - 1)) * value_heads + head
        next_decay, next_beta = tl.load(log_decay + ahead), tl.load(beta + ahead)
        state = state * tl.exp(decay)
        correction = (read - tl.sum(state * keys, 0)) * strength
        tl.store(corrections + at_value, correction, mask=value_live)
        state = written(state, keys, correction[None, :], KEYS, VALUES)
        tl.store(out + at_value, tl.sum(state * queries, 0), mask=value_live)
        state = state.to(states.dtype.element_ty).to(tl.float32)
    if write:
        # Times one: addresses that are worked out anew, and not held in registers through the loop.
        key *= write
        home = home_of(states, slots, request, head, key, value, value_heads, key_dim, value_dim)
        tl.store(home, state.to(states.dtype.element_ty), mask=live)


@jit
def replay_rows(
    k,
    corrections,
    log_decay,
    lengths,
    states,
    slots,
    rows,
    key_heads,
    value_heads,
    key_dim,
    value_dim,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some columns of one head's state of one request, through the rows that stand."""
    follow(PDL)
    request, head, key, value = slice_of_program(KEYS, VALUES)
    key_live, value_live = key < key_dim, value < value_dim
    live = key_live[:, None] & value_live[None, :]
    home = home_of(states, slots, request, head, key, value, value_heads, key_dim, value_dim)
    state = tl.load(home, mask=live, other=0.0).to(tl.float32)
    key_head = head // (value_heads // key_heads)
    length = tl.load(lengths + request).to(tl.int32)
    first = request * rows
    at_head = first * value_heads + head
    next_decay = tl.load(log_decay + at_head)
    for t in tl.range(length, num_stages=3):
        at_head = (first + t) * value_heads + head
        at_key = ((first + t) * key_heads + key_head) * key_dim + key
        keys = tl.load(k + at_key, mask=key_live, other=0.0)[:, None]
        at_value = at_head * value_dim + value
        correction = tl.load(corrections + at_value, mask=value_live, other=0.0)[None, :]
        decay = next_decay
        next_decay = tl.load(log_decay + (first + tl.minimum(t + 1, rows - 1)) * value_heads + head)
        state = state * tl.exp(decay)
        state = written(state, keys, correction, KEYS, VALUES)
        state = state.to(states.dtype.element_ty).to(tl.float32)
    tl.store(home, state.to(states.dtype.element_ty), mask=live)


@jit
def slice_of_program(KEYS: tl.constexpr, VALUES: tl.constexpr):
    """Whose state a program holds: request, head, ids of its rows ``[KEYS]`` and columns.

    Programs that run at the same time hold slices of the same heads, which lie side by side.
    """
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    request = tl.program_id(2).to(tl.int64)
    return request, tl.program_id(1), tl.arange(0, KEYS), value


@jit
def home_of(states, slots, request, head, key, value, value_heads, key_dim, value_dim):
    """Where the slice lies: pointers ``[KEYS, VALUES]``."""
    state = tl.load(slots + request) * value_heads + head
    return states + state * key_dim * value_dim + (key[:, None] * value_dim + value[None, :])


@jit
def written(state, keys, correction, KEYS: tl.constexpr, VALUES: tl.constexpr):
    """``state + keys correctionᵀ``, rounded once: as one operation, whatever stands around it."""
    shape: tl.constexpr = (KEYS, VALUES)
    return tl.fma(tl.broadcast_to(keys, shape), tl.broadcast_to(correction, shape), state)
