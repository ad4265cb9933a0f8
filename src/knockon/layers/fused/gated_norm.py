"""The gated delta rule's outputs, normed head by head and gated."""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from knockon.layers.fused.dispatch import fuses
from knockon.layers.fused.pdl import follow, pdl
from knockon.layers.fused.row_strides import common_divisor
from knockon.triton_backend import jit, power_of_two, tl

HEADS = 8  # of a row, by a program


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


def gated_norm_kernel(
    out: Tensor, z: Tensor, weight: Tensor, eps: float, together: int = HEADS
) -> Tensor:
    """:func:`gated_norm` in one launch.

    Args:
        together: heads of a program, a warp each; a power of two. Bits do not depend on it.
    """
    batch, count, heads, dim = out.shape
    gated = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    if out.numel():
        gate_heads[(batch * count, -(-heads // together))](
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
            HEADS=together,
            ALIGNED=common_divisor(z),
            num_warps=together,
            enable_fp_fusion=False,
            **pdl(z),
        )
    return gated


# Bits of a row must not depend on how many rows there are: nothing of that is a constant here, and
# products and sums are rounded one by one rather than as the compiler would pair them up.
@jit(do_not_specialize=["count", "z_request", "z_row"])
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
    HEADS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A few heads of one row, a warp each."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    live = (head < heads) & (at < dim)
    place = row * heads * dim + head * dim + at
    x = tl.load(out + place, mask=live, other=0.0)
    source = tl.multiple_of((row // count) * z_request + (row % count) * z_row, ALIGNED)
    gate = tl.load(z + source + head * dim + at, mask=live, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / dim + eps)
    x *= tl.load(weight + 0 * head + at, mask=live, other=0.0)
    opened = x * gate * tl.sigmoid(gate)
    tl.store(gated + place, opened.to(gated.dtype.element_ty), mask=live)
