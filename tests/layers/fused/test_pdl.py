"""Kernels that start before the one ahead has drained compute what they compute when they wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from knockon.layers.fused import pdl as pdl_module
from knockon.layers.fused.add_rms_norm import add_rms_norm_kernel
from knockon.layers.fused.pdl import pdl
from knockon.layers.fused.silu_mul import silu_mul_kernel
from knockon.layers.fused.stream_launch import StreamLaunch
from knockon.layers.fused.stream_linear import stream_linear_kernel

SIZE = 1024
LAUNCHES = (
    StreamLaunch(32, 128, splits=4, prefetch=1024),
    StreamLaunch(64, 64, prefetch=512),
    StreamLaunch(64, 128, tma=True, prefetch=512),
)


def test_nothing_starts_early_on_a_cpu() -> None:
    assert pdl(torch.zeros(1)) == {"PDL": False}


def steps(x: Tensor, weights: list[Tensor], gain: Tensor, side: torch.cuda.Stream) -> Tensor:
    """A few hundred kernels, each of what the one before wrote, in memory that is used again."""
    stream = torch.cuda.current_stream()
    delta = None
    for index, weight in enumerate(weights * 12):
        x, normed = add_rms_norm_kernel(x, delta, gain, 1e-6)
        wide = stream_linear_kernel(normed, weight, None, LAUNCHES[index % 3])
        if index % 4 == 1:  # behind a plain kernel, a copy, a memset, a join
            wide = wide.clone() + torch.zeros_like(wide)
        if index % 4 == 2:
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                other = silu_mul_kernel(wide)
            half = silu_mul_kernel(wide)
            stream.wait_stream(side)
            delta, _ = add_rms_norm_kernel(half, other, gain, 1e-6)  # right behind the join
            continue
        delta = silu_mul_kernel(wide)
    return add_rms_norm_kernel(x, delta, gain, 1e-6)[1]


def captured(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16])
def test_graphs_give_the_same_bits_as_kernels_that_wait(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(torch.bfloat16)

    weights = [make(2 * SIZE, SIZE) / SIZE**0.5 for _ in range(8)]
    gain, x, side = make(SIZE), make(rows, SIZE), torch.cuda.Stream()
    early, got = captured(lambda: steps(x, weights, gain, side))
    monkeypatch.setattr(pdl_module, "_supported", lambda device: False)
    assert pdl(x) == {"PDL": False}
    waiting, wanted = captured(lambda: steps(x, weights, gain, side))
    for _ in range(50):
        x.copy_(make(rows, SIZE))
        got.fill_(float("nan"))
        early.replay()
        waiting.replay()
        assert torch.equal(got, wanted)
