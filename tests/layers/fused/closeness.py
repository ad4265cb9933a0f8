"""How near a kernel must come to its twin, by dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

# BF16 in Triton's interpreter is tried on a device alone, like what takes long there.
DTYPES = (
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
)

# Sums in another order, then rounded: one step of the dtype where that falls the other way, and
# one more where a rounded value is multiplied and rounded again.
_STEPS = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def assert_near(got: Tensor, wanted: Tensor, steps: float = 2.0) -> None:
    """Elementwise within ``steps`` roundings, of the element or, near zero, of the largest."""
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    bound = _STEPS[wanted.dtype] * steps
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    torch.testing.assert_close(got, wanted, rtol=bound, atol=bound * largest * 0.25)


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(device)
