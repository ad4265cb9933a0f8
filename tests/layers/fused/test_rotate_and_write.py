"""Rotated queries and what lies in the pages are the twin's; nothing else in them is touched."""

from __future__ import annotations

import pytest
import torch

from knockon.layers.attention.base import PagedKV
from knockon.layers.fused.rotate_and_write import (
    HeadNorm,
    rotate_and_write_kernel,
    rotate_and_write_plain,
)
from knockon.layers.rotary import RopeConfig, RotaryEmbedding, Rotation
from tests.layers.fused.closeness import DTYPES, assert_near, random

POSITIONS = 97


def check(
    batch: int,
    rows: int,
    sizes: tuple[int, int, int],
    norm: bool,
    dtype: torch.dtype,
    device: torch.device,
    partial: float = 1.0,
    weights: torch.dtype | None = None,
) -> None:
    heads, kv_heads, dim = sizes
    rope = RopeConfig(1e4, partial_rotary_factor=partial)
    rotary = RotaryEmbedding(rope, dim, POSITIONS, device)
    generator = torch.Generator().manual_seed(batch * rows)
    positions = torch.randint(0, POSITIONS, (batch, rows), generator=generator).to(device)
    slots = torch.randperm(batch * rows + 9, generator=generator)[: batch * rows].to(device)
    qkv = random(batch, rows, (heads + 2 * kv_heads) * dim, dtype=dtype, device=device)
    head_norm = None
    if norm:
        weight = 1 + 0.3 * random(heads + kv_heads, dim, dtype=weights or dtype, device=device)
        head_norm = HeadNorm(weight, 1e-6)
    results = []
    for function in (rotate_and_write_kernel, rotate_and_write_plain):
        kv = PagedKV.allocate(batch * rows + 9, kv_heads, dim, dtype, device)
        q = function(qkv.clone(), Rotation(rotary, positions), slots, kv, head_norm)
        results.append((q, kv))
    (q, kv), (wanted_q, wanted) = results
    assert q.is_contiguous()
    assert_near(q, wanted_q)
    assert_near(kv.k, wanted.k)
    assert torch.equal(kv.v, wanted.v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("batch", "rows", "sizes"),
    [(2, 3, (6, 3, 10)), (1, 1, (9, 3, 64)), (1, 2, (5, 5, 16)), (3, 1, (8, 1, 128))],
)
def test_kernel_equals_twin(
    batch: int,
    rows: int,
    sizes: tuple[int, int, int],
    norm: bool,
    dtype: torch.dtype,
    kernel_device: torch.device,
) -> None:
    check(batch, rows, sizes, norm, dtype, kernel_device)


@pytest.mark.parametrize("norm", [True, False])
def test_dimensions_past_the_rotary_ones_stay(norm: bool, kernel_device: torch.device) -> None:
    for dim, partial in ((16, 0.5), (20, 0.4)):
        check(2, 2, (3, 2, dim), norm, torch.float32, kernel_device, partial)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_may_be_wider_than_heads(dtype: torch.dtype, kernel_device: torch.device) -> None:
    check(2, 3, (6, 3, 16), True, dtype, kernel_device, 0.25, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "norm"), [((32, 8, 128), True), ((32, 8, 64), False), ((24, 4, 256), True)]
)
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (32, 16), (1, 2048)])
def test_kernel_equals_twin_at_models_sizes(
    batch: int,
    rows: int,
    sizes: tuple[int, int, int],
    norm: bool,
    dtype: torch.dtype,
    kernel_device: torch.device,
) -> None:
    check(batch, rows, sizes, norm, dtype, kernel_device)
