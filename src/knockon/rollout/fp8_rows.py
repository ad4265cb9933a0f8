"""Rows as FP8 codes with a scale each: ``x = code * scale`` to within the code's rounding.

Codes are ``float8_e4m3fn``, three bits of mantissa and values up to 448. With the largest magnitude
of a row at 448, an element is off by at most 2^-4 of itself or 2^-10 of the row's scale, whichever
is more.
"""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from knockon.triton_backend import jit, power_of_two, runs_on, tl

CODE = torch.float8_e4m3fn
LARGEST_CODE = 448.0
# A row of zeros gets this in place of its largest magnitude, so that no scale is zero.
LEAST = 1e-30


@jit
def _quantise_rows(
    x, codes, scales, width, stride, LARGEST: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    real = column < width
    values = tl.load(x + row * stride + column, mask=real, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(values), axis=0), LEAST)
    limit = tl.full((), LARGEST, tl.float32)
    tl.store(scales + row, tl.div_rn(largest, limit))
    scaled = values * tl.div_rn(limit, largest)
    tl.store(codes + row * width + column, scaled.to(tl.float8e4nv), mask=real)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[N, H]`` and scales ``[N, 1]`` FP32 of ``x [N, H]``, its rows contiguous.

    A NaN or an infinity leaves a NaN code in its row.
    """
    return launch_quantise_rows(x) if runs_on(x) else quantise_rows_plain(x)


def launch_quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`quantise_rows`, by the kernel: one launch, a program a row."""
    rows, width = x.shape
    codes = torch.empty((rows, width), dtype=CODE, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        block = power_of_two(width)
        warps = min(8, max(1, block // 512))
        _quantise_rows[(rows,)](
            x, codes, scales, width, x.stride(0), LARGEST_CODE, LEAST, BLOCK=block, num_warps=warps
        )
    return codes, scales


def quantise_rows_plain(x: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`quantise_rows`, in PyTorch."""
    values = x.float()
    largest = values.abs().amax(-1, keepdim=True).clamp_min(LEAST)
    # Divided by a tensor: a scalar divisor would be turned into a factor on a GPU.
    limit = torch.full_like(largest, LARGEST_CODE)
    return (values * (limit / largest)).to(CODE), largest / limit
