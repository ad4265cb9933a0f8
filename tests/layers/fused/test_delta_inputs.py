"""What surrounds the delta rule in one launch before and one behind: the twins' numbers."""

from __future__ import annotations

import pytest
import torch

from knockon.layers.delta_rule import DeltaInputs
from knockon.layers.fused.delta_inputs import (
    DeltaWeights,
    delta_inputs_kernel,
    delta_inputs_plain,
    gated_norm_kernel,
    gated_norm_plain,
)
from tests.layers.fused.closeness import DTYPES, assert_near, random

SIZES = [(2, 3, 2, 4, 16, 24), (1, 1, 3, 3, 10, 40), (3, 4, 1, 2, 8, 8)]


def check(sizes: tuple[int, ...], taps: int, dtype: torch.dtype, device: torch.device) -> None:
    batch, rows, key_heads, heads, key, value = sizes
    channels = 2 * key_heads * key + heads * value

    def wide(*shape: int, seed: int = 0) -> torch.Tensor:
        return random(*shape, dtype=torch.float32, device=device, seed=seed)

    weights = DeltaWeights(
        wide(taps, channels), -wide(heads).exp(), wide(heads, seed=1), key, value
    )
    source = random(batch, taps - 1 + rows, channels, dtype=dtype, device=device)
    # Gates and the output's gate as the projection leaves them: parts of longer rows.
    projected = random(batch, rows, heads * value + 2 * heads, dtype=dtype, device=device, seed=2)
    projected[..., 0] *= 40  # gates far open and far shut
    projected[..., -1] *= 40
    z, b, a = projected.split_with_sizes((heads * value, heads, heads), -1)
    found = delta_inputs_kernel(source, b, a, weights)
    wanted = delta_inputs_plain(source, b, a, weights)
    for name, ours, theirs in zip(DeltaInputs._fields, found, wanted, strict=True):
        assert ours.is_contiguous(), name
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6, msg=name)
    out, norm = wide(batch, rows, heads, value, seed=3), wide(value, seed=4)
    gated = gated_norm_kernel(out, z, norm, 1e-6)
    assert gated.is_contiguous()
    assert_near(gated, gated_norm_plain(out, z, norm, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sizes", "taps"), list(zip(SIZES, (4, 2, 6), strict=True)))
def test_kernels_equal_twins(
    sizes: tuple[int, ...], taps: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    check(sizes, taps, dtype, kernel_device)


def test_a_gate_almost_shut_keeps_its_digits(kernel_device: torch.device) -> None:
    """``softplus`` of -12 is 6.1e-6, of -30 is 9.4e-14: lost if one were added to it first."""
    weights = DeltaWeights(
        torch.ones(2, 12, device=kernel_device),
        -torch.ones(1, device=kernel_device),
        torch.zeros(1, device=kernel_device),
        4,
        4,
    )
    a = torch.tensor([-12.0, -30.0, 0.0, 30.0], device=kernel_device).view(4, 1, 1)
    rows = torch.ones(4, 2, 12, device=kernel_device)
    found = delta_inputs_kernel(rows, a, a, weights)
    wanted = -torch.nn.functional.softplus(a.double()).float()
    torch.testing.assert_close(found.log_decay, wanted, rtol=1e-5, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (1, 16), (32, 16), (1, 1024)])
def test_kernels_equal_twins_at_models_sizes(
    batch: int, rows: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    check((batch, rows, 16, 48, 128, 128), 4, dtype, kernel_device)
