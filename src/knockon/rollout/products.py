"""Matrix products of 16-bit weights with FP32 sums, without an FP32 copy of the weights."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
# What is left of an FP32 number's pattern when it is cut to 0, 8, 16 and 24 significant bits.
_CUTS = (0, -(1 << 16), -(1 << 8), -1)


def sums_in_fp32(weight: Tensor) -> bool:
    """Whether the device multiplies ``weight`` as it is and returns FP32 sums: CUDA, 16 bits."""
    return weight.is_cuda and weight.dtype in _SIXTEEN_BITS


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``x [N, H] · weightᵀ`` of ``weight [E, H]``, summed and returned in ``dtype``."""
    if dtype == torch.float32 and x.dtype == weight.dtype and sums_in_fp32(weight):
        return torch.mm(x, weight.t(), out_dtype=dtype)
    return torch.nn.functional.linear(x.to(dtype), weight.to(dtype))


def three_parts(x: Tensor) -> Tensor:
    """FP32 ``x [B, E]`` as three BF16 numbers that add up to it: ``[B, 3, E]``.

    FP32 has 24 significant bits, BF16 eight with the same exponents, so the differences between
    ``x`` cut to 8, 16 and 24 bits are BF16 numbers exactly. (What lies below BF16's least number,
    2**-133, is lost; ``x`` is finite.)
    """
    batch, width = x.shape
    cut = (x.view(torch.int32).unsqueeze(1) & cuts(x.device)).view(torch.float32)
    parts = torch.empty((batch, 3, width), dtype=torch.bfloat16, device=x.device)
    return torch.sub(cut[:, 1:], cut[:, :-1], out=parts)


@lru_cache(maxsize=16)
def cuts(device: torch.device) -> Tensor:
    """The masks of :func:`three_parts`, ``[4, 1]``; made before a graph captures their use."""
    return torch.tensor(_CUTS, dtype=torch.int32).unsqueeze(1).to(device)


def bmm_into(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """``out = x @ weight`` of BF16 ``[B, M, E]`` and ``[B, E, K]``, with FP32 sums."""
    if sums_in_fp32(weight):
        torch.ops.aten.bmm.dtype_out(x, weight, torch.float32, out=out)
    else:
        out.copy_(torch.bmm(x.float(), weight.float()))
