"""The gate's kernel and its twin."""

from __future__ import annotations

import pytest
import torch

from knockon.layers.fused.silu_mul import silu_mul_kernel, silu_mul_plain
from tests.layers.fused.closeness import DTYPES, assert_near, random


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 80), (1, 1, 1), (1, 2, 1536), (3, 1027), (2, 0, 8)])
def test_kernel_equals_twin(
    shape: tuple[int, ...], dtype: torch.dtype, kernel_device: torch.device
) -> None:
    gate_up = 3 * random(*shape[:-1], 2 * shape[-1], dtype=dtype, device=kernel_device)
    assert_near(silu_mul_kernel(gate_up), silu_mul_plain(gate_up))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1536, 12288, 17408])
@pytest.mark.parametrize("rows", [1, 512, 70_000])
def test_kernel_equals_twin_at_models_sizes(
    rows: int, size: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    if rows > 512 and size > 1536:
        pytest.skip("large enough")
    gate_up = 3 * torch.randn(rows, 2 * size, dtype=dtype, device=kernel_device)
    assert_near(silu_mul_kernel(gate_up), silu_mul_plain(gate_up))
