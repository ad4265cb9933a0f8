"""Around the gated delta rule: what it reads of a layer's projections, and its outputs' gate."""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from knockon.layers.delta_rule import DeltaInputs
from knockon.layers.fused.dispatch import fuses
from knockon.layers.fused.pdl import follow, pdl
from knockon.layers.short_conv import short_conv
from knockon.layers.whole_vectors import by_whole_vectors
from knockon.triton_backend import jit, power_of_two, tl

_EPS = 1e-6  # of the length of queries and keys


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


def delta_inputs(rows: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights) -> DeltaInputs:
    """Convolve, bring queries and keys to length one, and open the gates.

    Args:
        rows: ``[B, K - 1 + T, C]``, inputs of the convolution and those before them.
        b, a: ``[B, T, value_heads]``, what writing strengths and decays come from; they may be
            parts of longer rows.
    """
    if fuses(rows):
        return delta_inputs_kernel(rows, b, a, weights)
    return delta_inputs_plain(rows, b, a, weights)


def delta_inputs_plain(rows: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights) -> DeltaInputs:
    """The twin of :func:`delta_inputs_kernel`."""
    key, value, wide = weights.key_dim, weights.value_dim, weights.conv.dtype
    values = b.shape[-1] * value
    keys = (rows.shape[-1] - values) // 2
    mixed = short_conv(rows, weights.conv)
    q, k, v = mixed.split_with_sizes((keys, keys, values), -1)
    return DeltaInputs(
        q=_unit(q.unflatten(-1, (-1, key))) * key**-0.5,
        k=_unit(k.unflatten(-1, (-1, key))),
        v=v.unflatten(-1, (-1, value)),
        log_decay=weights.rate * by_whole_vectors(F.softplus, a.to(wide) + weights.dt_bias),
        beta=by_whole_vectors(torch.sigmoid, b.to(wide)),
    )


def delta_inputs_kernel(rows: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights) -> DeltaInputs:
    """:func:`delta_inputs` in one launch."""
    key, value, taps = weights.key_dim, weights.value_dim, len(weights.conv)
    batch, count, heads = b.shape
    key_heads = (rows.shape[-1] - heads * value) // (2 * key)

    def made(*shape: int) -> Tensor:
        return torch.empty((batch, count, *shape), dtype=torch.float32, device=rows.device)

    found = DeltaInputs(
        made(key_heads, key), made(key_heads, key), made(heads, value), made(heads), made(heads)
    )
    if b.numel():
        enter_rows[(batch * count, 2 * key_heads + heads)](
            rows.contiguous(),
            b,
            a,
            weights.conv,
            weights.rate,
            weights.dt_bias,
            *found,
            count,
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
            num_warps=1,
            **pdl(rows),
        )
    return found


def gated_norm(out: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``rms_norm(out) * weight * silu(z)``, head by head, rounded once to ``z``'s dtype.

    Args:
        out: ``[B, T, heads, D]`` in FP32 or FP64. weight: ``[D]`` likewise.
        z: ``[B, T, heads * D]``, which may be a part of longer rows.

    Returns:
        As ``z``.
    """
    if fuses(z):
        return gated_norm_kernel(out, z, weight, eps)
    return gated_norm_plain(out, z, weight, eps)


def gated_norm_plain(out: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The twin of :func:`gated_norm_kernel`."""
    normed = F.rms_norm(out, weight.shape, weight, eps).flatten(-2)
    return (normed * F.silu(z.to(out.dtype))).to(z.dtype)


def gated_norm_kernel(out: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """:func:`gated_norm` in one launch."""
    batch, count, heads, dim = out.shape
    gated = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    if out.numel():
        gate_heads[(batch * count, heads)](
            out.contiguous(),
            z,
            weight,
            gated,
            count,
            z.stride(0),
            z.stride(1),
            heads,
            dim,
            eps,
            BLOCK=power_of_two(dim),
            num_warps=1,
            **pdl(z),
        )
    return gated


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


@jit
def enter_rows(
    rows,
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
    PDL: tl.constexpr,
):
    """One row's query, key or value head; with a value head go its gates."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    request, t = row // count, row % count
    channels = 2 * key_heads * key_dim + heads * value_dim
    # The row's first tap: the rows of a request begin with the K - 1 before its first.
    source = rows + (request * (count + TAPS - 1) + t) * channels
    # Triton asks that a name has one shape in both branches.
    if part < 2 * key_heads:
        at = tl.arange(0, KEYS)
        live = at < key_dim
        x = convolved(source, conv, part * key_dim + at, live, channels, TAPS)
        x = x * tl.rsqrt(tl.sum(x * x, 0) + eps)
        place = row * key_heads * key_dim + at
        if part < key_heads:
            tl.store(q + place + part * key_dim, x * scale, mask=live)
        else:
            tl.store(k + place + (part - key_heads) * key_dim, x, mask=live)
    else:
        head = part - 2 * key_heads
        entry = tl.arange(0, VALUES)
        valid = entry < value_dim
        first = 2 * key_heads * key_dim + head * value_dim
        value = convolved(source, conv, first + entry, valid, channels, TAPS)
        tl.store(v + (row * heads + head) * value_dim + entry, value, mask=valid)
        gate = request * gate_request + t * gate_row + head
        opened = tl.load(a + gate).to(tl.float32) + tl.load(dt_bias + head)
        # log(1 + y) without losing a small y (Kahan).
        y = tl.exp(-tl.abs(opened))
        u = 1 + y
        log1p = tl.where(u == 1, y, tl.log(u) * (y / tl.where(u == 1, 1.0, u - 1)))
        speed = tl.maximum(opened, 0.0) + log1p
        tl.store(log_decay + row * heads + head, tl.load(rate + head) * speed)
        tl.store(beta + row * heads + head, tl.sigmoid(tl.load(b + gate).to(tl.float32)))


@jit
def convolved(source, conv, channel, live, channels, TAPS: tl.constexpr):
    """``SiLU`` of the convolution in some channels; sums in the taps' order."""
    total = tl.load(source + channel, mask=live, other=0.0).to(tl.float32)
    total *= tl.load(conv + channel, mask=live, other=0.0)
    for tap in tl.static_range(1, TAPS):
        x = tl.load(source + tap * channels + channel, mask=live, other=0.0).to(tl.float32)
        total += x * tl.load(conv + tap * channels + channel, mask=live, other=0.0)
    return total * tl.sigmoid(total)


@jit
def gate_heads(
    out,
    z,
    weight,
    gated,
    count,
    z_request,
    z_row,
    heads,
    dim,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one row."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    live = at < dim
    x = tl.load(out + (row * heads + head) * dim + at, mask=live, other=0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / dim + eps)
    x *= tl.load(weight + at, mask=live, other=0.0)
    source = z + (row // count) * z_request + (row % count) * z_row + head * dim
    gate = tl.load(source + at, mask=live, other=0.0).to(tl.float32)
    place = gated + (row * heads + head) * dim + at
    tl.store(place, (x * gate * tl.sigmoid(gate)).to(gated.dtype.element_ty), mask=live)
