"""The delta rule's outputs, normed and gated in one launch: the twin's numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from knockon.layers.fused.gated_norm import gated_norm_kernel, gated_norm_plain
from tests.layers.fused.closeness import DTYPES, assert_near, random

SIZES = [(2, 3, 4, 24), (1, 1, 3, 40), (3, 4, 9, 8)]
TOGETHER = [1, 2, 4, 8, 16]


def make(
    sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, gates as the projection leaves them and weights."""
    batch, rows, heads, dim = sizes
    projected = random(batch, rows, 3 + heads * dim + 7, dtype=dtype, device=device)
    out = random(*sizes, dtype=torch.float32, device=device, seed=1)
    return out, projected[..., 3:-7], random(dim, dtype=torch.float32, device=device, seed=2)


@pytest.mark.parametrize("together", TOGETHER)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_the_kernel_equals_its_twin(
    sizes: tuple[int, ...], dtype: torch.dtype, together: int, kernel_device: torch.device
) -> None:
    out, z, weight = make(sizes, dtype, kernel_device)
    gated = gated_norm_kernel(out, z, weight, 1e-6, together)
    assert gated.is_contiguous()
    assert_near(gated, gated_norm_plain(out, z, weight, 1e-6))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [48, 15, 12])
@pytest.mark.parametrize(("batch", "rows"), [(1, 16), (32, 16), (1, 1024)])
def test_rows_are_alike_in_any_block_by_any_launch_at_models_sizes(
    batch: int, rows: int, heads: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    out, z, weight = make((batch, rows, heads, 128), dtype, kernel_device)
    block = gated_norm_kernel(out, z, weight, 1e-6)
    assert_near(block, gated_norm_plain(out, z, weight, 1e-6))
    for together in TOGETHER:
        assert torch.equal(gated_norm_kernel(out, z, weight, 1e-6, together), block)
    for t in range(0, rows, max(1, rows // 16)):
        row = slice(t, t + 1)
        one = gated_norm_kernel(out[:, row], z[:, row], weight, 1e-6)
        assert torch.equal(one, block[:, row])
