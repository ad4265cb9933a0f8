"""What the delta rule reads in one launch: the twin's numbers, and bits of its own."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from knockon.layers.delta_rule import DeltaInputs
from knockon.layers.fused.delta_inputs import (
    DeltaWeights,
    Strip,
    delta_inputs_kernel,
    delta_inputs_plain,
    strip_of,
)
from knockon.layers.short_conv import ConvRows
from tests.layers.fused.closeness import DTYPES, random

SIZES = [(2, 3, 2, 4, 16, 24), (1, 1, 3, 3, 10, 40), (3, 4, 1, 2, 8, 8)]
TAPS = (4, 2, 6)
STRIPS = [Strip(1, 1), Strip(2, 1), Strip(4, 2), Strip(8, 4)]


class Case(NamedTuple):
    """Arguments of :func:`delta_inputs_kernel`."""

    conv: ConvRows
    b: Tensor
    a: Tensor
    weights: DeltaWeights


def make(
    sizes: tuple[int, ...],
    taps: int,
    dtype: torch.dtype,
    device: torch.device,
    starts: list[int] | None = None,
) -> Case:
    """Inputs and gates as a projection leaves them, and more slots than requests."""
    batch, rows, key_heads, heads, key, value = sizes
    channels = 2 * key_heads * key + heads * value

    def wide(*shape: int, seed: int = 0) -> Tensor:
        return random(*shape, dtype=torch.float32, device=device, seed=seed)

    weights = DeltaWeights(
        wide(taps, channels), -wide(heads).exp(), wide(heads, seed=1), key, value
    )
    width = channels + heads * value + 2 * heads
    projected = random(batch, rows, width, dtype=dtype, device=device, seed=2)
    projected[..., -2 * heads] *= 40  # gates far open and far shut
    projected[..., -1] *= 40
    mixed, _, b, a = projected.split_with_sizes((channels, heads * value, heads, heads), -1)
    before = random(batch + 3, taps - 1, channels, dtype=dtype, device=device, seed=3)
    # Slots and starts as a prefill has them: columns of one tensor.
    where = torch.zeros(batch, 5, dtype=torch.int64, device=device)
    where[:, 0] = torch.arange(batch + 1, 1, -1, device=device)
    if starts is not None:
        where[:, 1] = torch.tensor(starts, device=device)
    conv = ConvRows(mixed, before, where[:, 0], None if starts is None else where[:, 1])
    return Case(conv, b, a, weights)


def check(case: Case, strip: Strip | None = None) -> None:
    found = delta_inputs_kernel(*case, strip)
    wanted = delta_inputs_plain(*case)
    for name, ours, theirs in zip(DeltaInputs._fields, found, wanted, strict=True):
        assert ours.is_contiguous(), name
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6, msg=name)


def check_bits(case: Case, strips: list[Strip | None]) -> None:
    """A row of a block, by any strip, has the bits of the row alone."""
    conv, b, a, weights = case
    blocks = [delta_inputs_kernel(*case, strip) for strip in strips]
    joined, before = conv.joined(), weights.conv.shape[0] - 1
    slots = torch.arange(len(joined), device=joined.device)
    for t in range(conv.rows.shape[1]):
        row = slice(t, t + 1)
        alone = ConvRows(conv.rows[:, row], joined[:, t : t + before].contiguous(), slots)
        one = delta_inputs_kernel(alone, b[:, row], a[:, row], weights)
        for block, strip in zip(blocks, strips, strict=True):
            for name, ours, whole in zip(DeltaInputs._fields, one, block, strict=True):
                assert torch.equal(ours, whole[:, row]), (name, strip, t)


@pytest.mark.parametrize("strip", [None, *STRIPS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sizes", "taps"), list(zip(SIZES, TAPS, strict=True)))
def test_the_kernel_equals_its_twin(
    sizes: tuple[int, ...],
    taps: int,
    dtype: torch.dtype,
    strip: Strip | None,
    kernel_device: torch.device,
) -> None:
    check(make(sizes, taps, dtype, kernel_device), strip)


@pytest.mark.parametrize("strip", [None, *STRIPS])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_rows_before_are_the_slots_own_or_nothing_where_a_request_begins(
    rows: int, strip: Strip | None, kernel_device: torch.device
) -> None:
    case = make((3, rows, 1, 2, 8, 8), 4, torch.float32, kernel_device, [7, 0, 1])
    conv = case.conv
    joined = torch.cat([conv.before[[4, 3, 2]], conv.rows], 1)  # slots, request by request
    joined[1, :3] = 0
    conv.before[:2], conv.before[3], conv.before[5:] = torch.nan, torch.nan, torch.nan
    assert torch.equal(conv.joined(), joined)
    own = torch.arange(3, device=kernel_device)
    apart = ConvRows(joined[:, 3:].contiguous(), joined[:, :3].contiguous(), own)
    found, wanted = delta_inputs_kernel(*case, strip), delta_inputs_plain(apart, *case[1:])
    for name, ours, theirs in zip(DeltaInputs._fields, found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6, msg=name)


def test_a_row_has_the_same_bits_in_any_block_by_any_strip(kernel_device: torch.device) -> None:
    case = make((2, 9, 2, 4, 16, 24), 4, torch.float32, kernel_device, [0, 3])
    check_bits(case, [None, *STRIPS])


def test_rows_that_lie_apart_are_read_where_they_lie(kernel_device: torch.device) -> None:
    """Requests farther from each other than their rows, and rows at no multiple of 16 bytes."""
    case = make((2, 3, 2, 4, 16, 24), 4, torch.float32, kernel_device)
    storage = torch.full((2, 5, case.conv.rows.shape[-1] + 7), torch.nan, device=kernel_device)
    apart = storage[:, 1:4, 3:-4]
    apart.copy_(case.conv.rows)
    gates = torch.full((2, 5, 11), torch.nan, device=kernel_device)
    gates[:, 1:4, 1:5], gates[:, 1:4, 5:9] = case.b, case.a
    b, a = gates[:, 1:4, 1:5], gates[:, 1:4, 5:9]
    found = delta_inputs_kernel(case.conv._replace(rows=apart), b, a, case.weights)
    for ours, theirs in zip(found, delta_inputs_plain(*case), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


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
    rows = torch.ones(4, 1, 12, device=kernel_device)
    conv = ConvRows(rows, rows, torch.arange(4, device=kernel_device))
    found = delta_inputs_kernel(conv, a, a, weights)
    wanted = -torch.nn.functional.softplus(a.double()).float()
    torch.testing.assert_close(found.log_decay, wanted, rtol=1e-5, atol=0)


def test_strips_are_as_long_as_leaves_a_device_busy() -> None:
    assert strip_of(32, 16, 80).rows == 8
    assert strip_of(1, 4096, 80).rows == 8
    assert strip_of(1, 16, 80).rows == 1
    for requests in (1, 8, 32):
        assert strip_of(requests, 1, 80).rows == 1
        assert strip_of(requests, 5, 80).rows <= 8


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (1, 16), (32, 16), (1, 1024)])
@pytest.mark.parametrize("heads", [(16, 48), (5, 15), (4, 12)])
def test_the_kernel_equals_its_twin_at_models_sizes(
    batch: int, rows: int, heads: tuple[int, int], dtype: torch.dtype, kernel_device: torch.device
) -> None:
    starts = [3 * (request % 2) for request in range(batch)]
    sizes = (batch, rows, *heads, 128, 128)
    for strip in (None, *STRIPS):
        check(make(sizes, 4, dtype, kernel_device, starts), strip)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(16, 48), (5, 15), (4, 12)])
@pytest.mark.parametrize("batch", [1, 32])
def test_a_row_has_the_same_bits_at_models_sizes(
    batch: int, heads: tuple[int, int], dtype: torch.dtype, kernel_device: torch.device
) -> None:
    sizes = (batch, 16, *heads, 128, 128)
    check_bits(make(sizes, 4, dtype, kernel_device), [None, *STRIPS])
    check_bits(make(sizes, 4, dtype, kernel_device, [0] * batch), [None])
