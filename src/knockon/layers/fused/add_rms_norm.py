"""The residual stream's next sum and its RMS norm (Zhang and Sennrich, arXiv 1910.07467)."""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from knockon.layers.fused.dispatch import fuses
from knockon.layers.fused.pdl import follow, pdl
from knockon.triton_backend import jit, power_of_two, tl


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``residual = x + delta`` and ``residual / sqrt(mean(residual²) + eps) * weight``.

    The norm is taken of the sum as it is stored, in ``x``'s dtype; statistics are FP32.

    Args:
        x: ``[..., H]``, left as it is.
        delta: what is to be added, of the same shape and dtype; ``None`` for nothing, and then the
            residual is ``x`` itself.
        weight: ``[H]``, in ``x``'s dtype or a wider one.

    Returns:
        The residual and its norm, both ``[..., H]`` in ``x``'s dtype.
    """
    if fuses(x):
        return add_rms_norm_kernel(x, delta, weight, eps)
    return add_rms_norm_plain(x, delta, weight, eps)


def add_rms_norm_plain(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The twin of :func:`add_rms_norm_kernel`."""
    residual = x if delta is None else x + delta
    return residual, rms_norm(residual, weight, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm over the last dimension in ``x``'s dtype, computed in the weight's if wider."""
    if weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = torch.promote_types(x.dtype, weight.dtype)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype)


def add_rms_norm_kernel(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """:func:`add_rms_norm` in one launch."""
    x = x.contiguous()
    size = x.shape[-1]
    residual = x if delta is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    block = power_of_two(size)
    if x.numel():
        norm_rows[(x.numel() // size,)](
            x,
            x if delta is None else delta.contiguous(),
            weight,
            residual,
            normed,
            size,
            eps,
            ADD=delta is not None,
            BLOCK=block,
            num_warps=max(1, min(16, block // 512)),
            **pdl(x),
        )
    return residual, normed


@jit
def norm_rows(
    x,
    delta,
    weight,
    residual,
    normed,
    size,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of ``[rows, size]``, whole in registers."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    live = at < size
    value = tl.load(x + row + at, mask=live, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + row + at, mask=live, other=0.0).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        tl.store(residual + row + at, rounded, mask=live)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    gain = tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    tl.store(normed + row + at, (value * scale * gain).to(x.dtype.element_ty), mask=live)
