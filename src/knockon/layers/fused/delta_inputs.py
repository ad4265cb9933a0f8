"""What the gated delta rule reads of a layer's projections.

One program takes a few rows of a request in a few heads: it reads its rows once, with the ``K - 1``
ahead of the first, which for a request's first rows lie in the slot's memory, and convolves out of
registers.
"""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from knockon.layers.delta_rule import DeltaInputs
from knockon.layers.fused.conv_window import convolved, rows_and_those_before, taps_of
from knockon.layers.fused.dispatch import fuses
from knockon.layers.fused.pdl import follow, pdl
from knockon.layers.fused.row_strides import common_divisor
from knockon.layers.short_conv import ConvRows, short_conv
from knockon.layers.whole_vectors import by_whole_vectors
from knockon.triton_backend import jit, power_of_two, tl

_EPS = 1e-6  # of the length of queries and keys
_ENOUGH = 1024  # warps that keep a device busy


class DeltaWeights(NamedTuple):
    """What turns projections into the rule's inputs, in FP32 or FP64.

    Attributes:
        conv: ``[K, C]``, channels of query heads first, then key heads, then value heads.
        rate: ``[value_heads]``, the negative of how fast each head forgets.
        dt_bias: ``[value_heads]``.
        key_dim, value_dim: sizes of heads.
    """

    conv: Tensor
    rate: Tensor
    dt_bias: Tensor
    key_dim: int
    value_dim: int


class Strip(NamedTuple):
    """What a program computes; powers of two. A row's bits do not depend on it.

    Attributes:
        rows: of one request, one after the other.
        heads: a warp each.
    """

    rows: int
    heads: int


def strip_of(requests: int, rows: int, heads: int) -> Strip:
    """The strip for so many rows of each request: up to 8 rows, if there are warps enough.

    Args:
        heads: of queries, keys and values together.
    """
    for most in (8, 4, 2):
        if most < 2 * rows and requests * -(-rows // most) * heads >= _ENOUGH:
            return Strip(most, 4)
    return Strip(1, 4)


def delta_inputs(conv: ConvRows, b: Tensor, a: Tensor, weights: DeltaWeights) -> DeltaInputs:
    """Convolve, bring queries and keys to length one, and open the gates.

    Args:
        conv: inputs of the convolution ``[B, T, C]`` and those before them.
        b, a: ``[B, T, value_heads]``, what writing strengths and decays come from; they may be
            parts of longer rows.
    """
    if fuses(conv.rows):
        return delta_inputs_kernel(conv, b, a, weights)
    return delta_inputs_plain(conv, b, a, weights)


def delta_inputs_plain(conv: ConvRows, b: Tensor, a: Tensor, weights: DeltaWeights) -> DeltaInputs:
    """The twin of :func:`delta_inputs_kernel`."""
    key, value, wide = weights.key_dim, weights.value_dim, weights.conv.dtype
    values = b.shape[-1] * value
    keys = (conv.rows.shape[-1] - values) // 2
    mixed = short_conv(conv.joined(), weights.conv)
    q, k, v = mixed.split_with_sizes((keys, keys, values), -1)
    return DeltaInputs(
        q=_unit(q.unflatten(-1, (-1, key))) * key**-0.5,
        k=_unit(k.unflatten(-1, (-1, key))),
        v=v.unflatten(-1, (-1, value)),
        log_decay=weights.rate * by_whole_vectors(F.softplus, a.to(wide) + weights.dt_bias),
        beta=by_whole_vectors(torch.sigmoid, b.to(wide)),
    )


def delta_inputs_kernel(
    conv: ConvRows, b: Tensor, a: Tensor, weights: DeltaWeights, strip: Strip | None = None
) -> DeltaInputs:
    """:func:`delta_inputs` in one launch.

    Args:
        conv: ``before`` is contiguous.
        b, a: strided alike.
        strip: of each program; ``None`` for :func:`strip_of` these rows.
    """
    key, value, taps = weights.key_dim, weights.value_dim, len(weights.conv)
    rows, starts = conv.rows, conv.starts
    batch, count, heads = b.shape
    key_heads = (rows.shape[-1] - heads * value) // (2 * key)

    def made(*shape: int) -> Tensor:
        return torch.empty((batch, count, *shape), dtype=torch.float32, device=rows.device)

    found = DeltaInputs(
        made(key_heads, key), made(key_heads, key), made(heads, value), made(heads), made(heads)
    )
    if b.numel():
        strip = strip or strip_of(batch, count, 2 * key_heads + heads)
        groups = 2 * -(-key_heads // strip.heads) + -(-heads // strip.heads)
        enter_rows[(batch * -(-count // strip.rows), groups)](
            rows,
            conv.before,
            conv.slots,
            conv.slots if starts is None else starts,
            b,
            a,
            weights.conv,
            weights.rate,
            weights.dt_bias,
            *found,
            count,
            rows.stride(0),
            rows.stride(1),
            conv.slots.stride(0),
            0 if starts is None else starts.stride(0),
            b.stride(0),
            b.stride(1),
            key_heads,
            heads,
            key,
            value,
            key**-0.5,
            _EPS,
            TAPS=taps,
            KEYS=power_of_two(key),
            VALUES=power_of_two(value),
            ROWS=strip.rows,
            HEADS=strip.heads,
            BEGINS=starts is not None,
            ALIGNED=common_divisor(rows),
            num_warps=strip.heads,
            enable_fp_fusion=False,
            **pdl(rows),
        )
    return found


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


# Bits of a row must not depend on how many rows there are: nothing of that is a constant here, and
# products and sums are rounded one by one rather than as the compiler would pair them up.
@jit(
    do_not_specialize=[
        "count",
        "row_request",
        "row_stride",
        "slot_stride",
        "start_stride",
        "gate_request",
        "gate_row",
    ]
)
def enter_rows(
    rows,
    before,
    slots,
    starts,
    b,
    a,
    conv,
    rate,
    dt_bias,
    q,
    k,
    v,
    log_decay,
    beta,
    count,
    row_request,
    row_stride,
    slot_stride,
    start_stride,
    gate_request,
    gate_row,
    key_heads,
    heads,
    key_dim,
    value_dim,
    scale,
    eps,
    TAPS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    BEGINS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A few rows of a few query, key or value heads; with value heads go their gates."""
    strips = tl.cdiv(count, ROWS)
    request = (tl.program_id(0) // strips).to(tl.int64)
    first = ((tl.program_id(0) % strips) * ROWS).to(tl.int64)
    group = tl.program_id(1)
    key_groups = tl.cdiv(key_heads, HEADS)
    channels = 2 * key_heads * key_dim + heads * value_dim
    # Triton asks that a name has one shape in both branches.
    if group < 2 * key_groups:
        part = group // key_groups  # queries, then keys
        head = (group % key_groups) * HEADS + tl.arange(0, HEADS)[:, None]
        at = tl.arange(0, KEYS)[None, :]
        live = (head < key_heads) & (at < key_dim)
        within = head * key_dim + at
        channel = part * key_heads * key_dim + within
        taps = taps_of(conv, channels, channel, live, TAPS)
        follow(PDL)
        window = rows_and_those_before(
            rows, before, slots, starts, request, first, count, row_request, row_stride,
            slot_stride, start_stride, channels, channel, live, TAPS, ROWS, BEGINS, ALIGNED,
        )  # fmt: skip
        into = tl.where(part == 0, q, k)
        length = tl.where(part == 0, scale, 1.0)
        for t in tl.static_range(ROWS):
            x = convolved(window, taps, t, TAPS)
            x = x * tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) + eps)
            place = (request * count + first + t) * key_heads * key_dim
            there = live & ((first + t)[None, None] < count)
            tl.store(into + place + within, x * length, mask=there)
    else:
        start = (group - 2 * key_groups) * HEADS
        own = start + tl.arange(0, HEADS)[:, None]
        entry = tl.arange(0, VALUES)[None, :]
        valid = (own < heads) & (entry < value_dim)
        inside = own * value_dim + entry
        value_channel = 2 * key_heads * key_dim + inside
        filters = taps_of(conv, channels, value_channel, valid, TAPS)
        gated = start + tl.arange(0, HEADS)[None, :]
        bias = tl.load(dt_bias + gated, mask=gated < heads, other=0.0)
        speed = tl.load(rate + gated, mask=gated < heads, other=0.0)
        follow(PDL)
        row = first + tl.arange(0, ROWS)[:, None]
        opening = (row < count) & (gated < heads)
        gate = request * gate_request + row * gate_row + gated
        opened = tl.load(a + gate, mask=opening, other=0.0).to(tl.float32) + bias
        strength = tl.load(b + gate, mask=opening, other=0.0).to(tl.float32)
        seen = rows_and_those_before(
            rows, before, slots, starts, request, first, count, row_request, row_stride,
            slot_stride, start_stride, channels, value_channel, valid, TAPS, ROWS, BEGINS, ALIGNED,
        )  # fmt: skip
        for t in tl.static_range(ROWS):
            value = convolved(seen, filters, t, TAPS)
            home = (request * count + first + t) * heads * value_dim
            held = valid & ((first + t)[None, None] < count)
            tl.store(v + home + inside, value, mask=held)
        # log(1 + y) without losing a small y (Kahan).
        y = tl.exp(-tl.abs(opened))
        u = 1 + y
        log1p = tl.where(u == 1, y, tl.log(u) * (y / tl.where(u == 1, 1.0, u - 1)))
        gate_home = (request * count + row) * heads + gated
        decay = speed * (tl.maximum(opened, 0.0) + log1p)
        tl.store(log_decay + gate_home, decay, mask=opening)
        tl.store(beta + gate_home, tl.sigmoid(strength), mask=opening)
