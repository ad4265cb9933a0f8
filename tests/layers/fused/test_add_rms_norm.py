"""The sum is the twin's to the bit, the norm but for the order of one sum."""

from __future__ import annotations

import pytest
import torch

from knockon.layers.fused.add_rms_norm import add_rms_norm_kernel, add_rms_norm_plain
from tests.layers.fused.closeness import DTYPES, assert_near, random


def check(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    add: bool,
    weights: torch.dtype | None = None,
) -> None:
    x = random(*shape, dtype=dtype, device=device)
    delta = random(*shape, dtype=dtype, device=device, seed=1) if add else None
    weight = random(shape[-1], dtype=weights or dtype, device=device, seed=2) + 1
    before = x.clone()
    residual, normed = add_rms_norm_kernel(x, delta, weight, 1e-5)
    wanted_residual, wanted = add_rms_norm_plain(x, delta, weight, 1e-5)
    assert torch.equal(residual, wanted_residual)
    assert torch.equal(x, before)
    assert_near(normed, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 64), (1, 2, 576), (1, 1, 1), (2, 1, 5120), (1, 8192)])
def test_kernel_equals_twin(
    shape: tuple[int, ...], dtype: torch.dtype, add: bool, kernel_device: torch.device
) -> None:
    check(shape, dtype, kernel_device, add)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weight_may_be_wider(dtype: torch.dtype, kernel_device: torch.device) -> None:
    check((2, 3, 80), dtype, kernel_device, True, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80, 576, 1024, 2560, 4096, 5120, 8192, 12288])
@pytest.mark.parametrize("rows", [(1, 1), (8, 16), (1, 4097)])
def test_kernel_equals_twin_at_models_sizes(
    rows: tuple[int, int], size: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    check((*rows, size), dtype, kernel_device, True)


def test_the_norm_is_of_the_sum_as_it_is_stored(kernel_device: torch.device) -> None:
    x = torch.full((1, 64), 1.0, dtype=torch.float16, device=kernel_device)
    delta = torch.full_like(x, 2.0**-12)  # lost in the sum
    ones = torch.ones_like(x[0])
    residual, normed = add_rms_norm_kernel(x, delta, ones, 0.0)
    assert torch.equal(residual, x)
    assert torch.equal(normed, x)


def test_without_a_delta_the_stream_is_passed_on(kernel_device: torch.device) -> None:
    x = random(2, 64, dtype=torch.float32, device=kernel_device)
    assert add_rms_norm_kernel(x, None, torch.ones_like(x[0]), 1e-5)[0] is x
