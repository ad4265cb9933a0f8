"""The kernels find the position that the order of logits says, to the last tie."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from knockon.rollout import order
from knockon.rollout.fused.argmax import ArgmaxLaunch, argmax_kernel, argmax_launch, load_stop
from tests.rollout.fused.hard_logits import HARD

DTYPES = (
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
)


def check(logits: Tensor, launch: ArgmaxLaunch | None = None) -> None:
    got = argmax_kernel(logits, launch)
    assert got.dtype == torch.int64
    assert torch.equal(got, order.ranks(logits).argmax(-1))


def hard(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    rng = torch.Generator(device).manual_seed(sum(shape))
    return HARD[kind](shape, rng).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", HARD)
def test_hard_logits(kind: str, dtype: torch.dtype, kernel_device: torch.device) -> None:
    logits = hard(kind, (2, 2, 300), dtype, kernel_device)
    check(logits)
    check(logits, ArgmaxLaunch(tile=64, tiles=2, chunks=3))
    check(logits[..., :1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_nothing_but_nan_and_minus_infinity(
    dtype: torch.dtype, kernel_device: torch.device
) -> None:
    logits = torch.full((5, 200), math.nan, dtype=dtype, device=kernel_device)
    logits[1] = -math.inf
    logits[2, 130:] = -math.inf
    logits[3, 199] = torch.finfo(dtype).min
    logits[4, ::2] = -math.inf
    for launch in (None, ArgmaxLaunch(64, 1, 4), ArgmaxLaunch(64, 3, 2)):
        assert argmax_kernel(logits, launch).tolist() == [0, 0, 130, 199, 0]


def test_what_lies_past_a_rows_end_never_wins(kernel_device: torch.device) -> None:
    wide = torch.randn(3, 320, device=kernel_device)
    wide[:, 301:] = math.inf
    check(wide[:, :301], ArgmaxLaunch(64, 5, 1))
    check(wide[:, :301])
    check(wide.view(1, 3, 320)[..., :301])
    check(wide[:, 7:301])
    check(wide[1])
    check(wide[0].expand(2, 3, -1))
    check(wide.t())


def test_whole_vectors_are_read_where_memory_goes_on(kernel_device: torch.device) -> None:
    wide = torch.zeros(3, 320, device=kernel_device)
    assert load_stop(wide[:, :301]) == 304
    assert load_stop(wide[:, :304]) == 304
    assert load_stop(torch.zeros(3, 301, device=kernel_device)) == 301
    assert load_stop(torch.zeros(1, 301, device=kernel_device)) == 301
    assert load_stop(wide[:, 19:]) == 301


@pytest.mark.parametrize("rows", [1, 16, 512, 5000])
@pytest.mark.parametrize("width", [1, 300, 32_000, 248_320])
def test_chunks_cover_a_row_and_none_is_empty(rows: int, width: int) -> None:
    launch = argmax_launch(rows, width)
    assert (launch.chunks - 1) * launch.tiles * launch.tile < width
    assert width <= launch.chunks * launch.tiles * launch.tile


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 15, 64, 512])
@pytest.mark.parametrize("width", [32_000, 49_152, 128_256, 151_669, 248_320])
def test_vocabularies_of_real_models(
    rows: int, width: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    for kind in ("normal", "few_values", "mostly_minus_inf"):
        wide = hard(kind, (rows, width + 64 - width % 64), dtype, kernel_device)
        wide[:, width:] = math.inf
        check(wide[:, :width])
        check(wide[:, :width].contiguous())
