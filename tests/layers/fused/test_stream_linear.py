"""The weight-streaming product and its twin."""

from __future__ import annotations

import pytest
import torch

from knockon.layers.fused.stream_launch import StreamLaunch
from knockon.layers.fused.stream_linear import stream_linear_kernel, stream_linear_plain
from tests.layers.fused.closeness import DTYPES, assert_near, random

SMALL = StreamLaunch(16, 32)
LAUNCHES = [SMALL, StreamLaunch(32, 32, splits=3, prefetch=1024), StreamLaunch(64, 64, tma=True)]
BIG_LAUNCHES = [
    StreamLaunch(32, 128, stages=6, prefetch=2048),
    StreamLaunch(64, 128, splits=4, prefetch=512),
    StreamLaunch(128, 64, warps=8, tma=True, prefetch=1024),
    StreamLaunch(64, 64, splits=3, stages=6, tma=True),
]


def check(
    m: int, n: int, k: int, launch: StreamLaunch, gated: bool, dtype: torch.dtype, device: str
) -> None:
    where = torch.device(device)
    x = random(m, k, dtype=dtype, device=where)
    weight = (random(n, k, dtype=torch.float32, device=where) / k**0.5).to(dtype)
    bias = random(n, dtype=dtype, device=where)
    for b in (None, bias):
        got = stream_linear_kernel(x, weight, b, launch, gated)
        # Three roundings follow one another where there is a gate.
        assert_near(got, stream_linear_plain(x, weight, b, gated), steps=6.0 if gated else 2.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("m", [1, 3, 17])
def test_kernel_equals_twin(
    m: int, launch: StreamLaunch, gated: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    # 80 rows and 144 columns fill no whole block of any of the launches.
    check(m, 160 if gated else 80, 144, launch, gated, dtype, kernel_device.type)


def test_counters_are_left_as_they_were_found(kernel_device: torch.device) -> None:
    x = random(2, 128, dtype=torch.float16, device=kernel_device)
    weight = random(64, 128, dtype=torch.float16, device=kernel_device)
    launch = StreamLaunch(16, 32, splits=4)
    first = stream_linear_kernel(x, weight, None, launch)
    assert torch.equal(first, stream_linear_kernel(x, weight, None, launch))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("launch", BIG_LAUNCHES)
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 12288), (1000, 4104)])
@pytest.mark.parametrize("m", [1, 16, 33])
def test_kernel_equals_twin_at_models_sizes(
    m: int, n: int, k: int, launch: StreamLaunch, dtype: torch.dtype
) -> None:
    check(m, n, k, launch, False, dtype, "cuda")
    check(m, n, k, launch, True, dtype, "cuda")
