"""Every draft layer's pages hold what the twin writes."""

from __future__ import annotations

import pytest
import torch

from knockon.layers.fused.write_context_kv import (
    write_context_kv_kernel,
    write_context_kv_plain,
)
from knockon.layers.rotary import RopeConfig, RotaryEmbedding, Rotation
from tests.layers.fused.closeness import DTYPES, assert_near, random


def check(
    batch: int,
    rows: int,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    partial: float = 1.0,
) -> None:
    layers, kv_heads, dim = sizes
    rotary = RotaryEmbedding(RopeConfig(1e4, partial_rotary_factor=partial), dim, 97, device)
    generator = torch.Generator().manual_seed(batch * rows)
    positions = torch.randint(0, 97, (batch, rows), generator=generator).to(device)
    slots = torch.randperm(batch * rows + 9, generator=generator)[: batch * rows].to(device)
    width = layers * 2 * kv_heads * dim
    projected = random(batch, rows, width, dtype=dtype, device=device)
    k_norm = 1 + 0.3 * random(layers, dim, dtype=dtype, device=device)
    shape = (layers, 2, batch * rows + 9, kv_heads, dim)
    pages, wanted = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    rotation = Rotation(rotary, positions)
    write_context_kv_kernel(projected, k_norm, 1e-6, rotation, slots, pages)
    write_context_kv_plain(projected, k_norm, 1e-6, rotation, slots, wanted)
    assert_near(pages[:, 0], wanted[:, 0])
    assert torch.equal(pages[:, 1], wanted[:, 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "rows", "sizes"), [(2, 3, (3, 5, 10)), (1, 1, (2, 1, 64)), (1, 2, (1, 4, 128))]
)
def test_kernel_equals_twin(
    batch: int,
    rows: int,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    kernel_device: torch.device,
) -> None:
    check(batch, rows, sizes, dtype, kernel_device)


def test_dimensions_past_the_rotary_ones_stay(kernel_device: torch.device) -> None:
    check(2, 2, (2, 3, 20), torch.float32, kernel_device, 0.4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (32, 16), (1, 2048)])
def test_kernel_equals_twin_at_models_sizes(
    batch: int, rows: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    check(batch, rows, (5, 8, 128), dtype, kernel_device)
