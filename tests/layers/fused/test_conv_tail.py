"""What a convolution's next row will read, put in its slot in one launch, as the plain way does."""

from __future__ import annotations

import pytest
import torch

from knockon.layers.fused import conv_tail
from knockon.layers.fused.conv_tail import write_tail_kernel
from knockon.layers.short_conv import ConvRows, inputs_before
from tests.layers.fused.closeness import DTYPES, random

SLOTS, STARTS, LENGTHS, ASIDE = range(4)


def check(
    batch: int,
    rows: int,
    taps: int,
    channels: int,
    dtype: torch.dtype,
    device: torch.device,
    begins: bool,
) -> None:
    """All counts that some request has, in place and aside, and one for all."""
    projected = random(batch, rows, channels + 5, dtype=dtype, device=device)
    before = random(2 * batch + 2, taps - 1, channels, dtype=dtype, device=device, seed=1)
    # Columns of one tensor, as a prefill has them.
    where = torch.zeros(batch, 5, dtype=torch.int64, device=device)
    where[:, SLOTS] = torch.arange(batch, device=device).flip(0) + 1
    where[:, STARTS] = torch.arange(batch, device=device) % 3
    where[:, LENGTHS] = torch.arange(batch, device=device) % (rows + 1)
    where[:, ASIDE] = where[:, SLOTS] + batch
    starts = where[:, STARTS] if begins else None
    for lengths in (where[:, LENGTHS], where[:, LENGTHS].flip(0), 1, rows):
        for column in (SLOTS, ASIDE):
            kept = before.clone()
            conv = ConvRows(projected[..., 2:-3], kept, where[:, SLOTS], starts)
            wanted = kept.clone()
            wanted[where[:, column]] = inputs_before(conv.joined(), lengths, taps)
            write_tail_kernel(conv, lengths, where[:, column])
            assert torch.equal(kept, wanted)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "taps"), [(1, 4), (2, 6), (5, 4), (3, 2)])
def test_tails_are_those_of_rows_and_what_was_before(
    rows: int, taps: int, dtype: torch.dtype, begins: bool, kernel_device: torch.device
) -> None:
    check(4, rows, taps, 13, dtype, kernel_device, begins)


def test_channels_of_several_programs(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conv_tail, "_BLOCK", 16)
    check(2, 3, 4, 40, torch.float32, kernel_device, True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [10240, 3210])
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (1, 16), (32, 16), (4, 300)])
def test_tails_at_models_sizes(
    batch: int, rows: int, channels: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    for begins in (False, True):
        check(batch, rows, 4, channels, dtype, kernel_device, begins)
