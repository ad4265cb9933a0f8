"""The drawing kernels draw what the plain twin draws, with the same noise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from knockon.engine.filters import filter_logits, temper
from knockon.engine.fused.draw import DrawLaunch, _thresholds, draw_kernel, draw_launch
from knockon.engine.noise import exponential, row_keys
from knockon.engine.sampling import (
    DrawKind,
    SamplingBatch,
    SamplingRequest,
    draw_plain,
    sampling_row,
)
from knockon.engine.sampling_params import SamplingParams

NAN, INF = math.nan, math.inf
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "temperatures": [{}, {"temperature": 0.3}, {"temperature": 2.5}, {"temperature": 1e-6}],
    "beside greedy": [{"temperature": 0}, {}, {"temperature": 0}],
    "min-p": [{"min_p": 0.05}, {}, {"min_p": 0.5, "temperature": 0.7}],
    "top-k": [{"top_k": 1}, {"top_k": 7}, {}, {"top_k": 99, "temperature": 1.4}],
    "top-p": [{"top_p": 0.1}, {"top_p": 0.9}, {}, {"top_p": 0.999}, {"temperature": 0}],
    "all": [{"top_k": 9, "top_p": 0.8, "min_p": 0.02}, {"top_p": 0.5}, {"top_k": 3}, {}],
}
SMALL = DrawLaunch(tile=64, tiles=2, chunks=0, warps=1)


def batch_of(
    settings: Sequence[dict[str, Any]], width: int, device: torch.device | str
) -> SamplingBatch:
    requests = [SamplingRequest(SamplingParams(**s), 31 * i - 5) for i, s in enumerate(settings)]
    return SamplingBatch.build(requests, width, device)


def inputs(
    requests: int, rows: int, width: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    logits = (torch.randn(requests, rows, width, generator=rng) * 3).to(dtype).to(device)
    starts = torch.randint(0, 100_000, (requests, 1), generator=rng)
    return logits, (starts + torch.arange(rows)).to(device)


def small(width: int) -> DrawLaunch:
    return replace(SMALL, chunks=-(-width // (SMALL.tile * SMALL.tiles)))


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_equal_the_twin(name: str, kernel_device: torch.device) -> None:
    settings = SETTINGS[name]
    for rows, width in ((1, 500), (4, 129)):
        logits, positions = inputs(len(settings), rows, width, FP32, kernel_device)
        batch = batch_of(settings, width, kernel_device)
        wanted = draw_plain(logits, positions, batch)
        for launch in (None, small(width)):
            assert torch.equal(draw_kernel(logits, positions, batch, launch), wanted)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_kind_that_a_graph_is_made_for_changes_no_draw(
    name: str, kernel_device: torch.device
) -> None:
    settings = SETTINGS[name]
    logits, positions = inputs(len(settings), 2, 300, FP32, kernel_device)
    batch = batch_of(settings, 300, kernel_device)
    kind = DrawKind.of([sampling_row(SamplingParams(**s), 300) for s in settings]).widened()
    widened = replace(batch, **kind._asdict())
    assert (widened.max_top_k > 300) == (batch.max_top_k > 0)
    wanted = draw_kernel(logits, positions, batch)
    assert torch.equal(draw_kernel(logits, positions, widened), wanted)


@pytest.mark.parametrize("name", ["temperatures", "all"])
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_draws_in_half_precision_equal_the_twin(
    name: str, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    settings = SETTINGS[name]
    logits, positions = inputs(len(settings), 2, 300, dtype, kernel_device)
    batch = batch_of(settings, 300, kernel_device)
    assert torch.equal(draw_kernel(logits, positions, batch), draw_plain(logits, positions, batch))


def test_rows_may_lie_apart_and_parameters_in_a_table(kernel_device: torch.device) -> None:
    settings = SETTINGS["all"]
    logits, positions = inputs(len(settings), 2, 300, FP16, kernel_device)
    batch = batch_of(settings, 290, kernel_device)
    integers = torch.stack([batch.seed, batch.top_k], dim=1)
    floats = torch.stack([batch.temperature, batch.top_p, batch.log_min_p], dim=1)
    strided = replace(
        batch,
        seed=integers[:, 0],
        top_k=integers[:, 1],
        temperature=floats[:, 0],
        top_p=floats[:, 1],
        log_min_p=floats[:, 2],
    )
    cut = logits[:, :, :290]
    wanted = draw_plain(cut, positions, batch)
    assert torch.equal(draw_kernel(cut, positions, strided, small(290)), wanted)


ODD_ROWS = {
    "NaN": [NAN, 1.0, NAN, 2.0, 1.5],
    "all NaN": [NAN] * 5,
    "all -inf": [-INF] * 5,
    "NaN and -inf": [NAN, -INF, -INF, NAN, NAN],
    "one finite": [-INF, -INF, NAN, -7.0, -INF],
    "inf": [0.0, INF, 1.0, -INF, NAN],
    "zeros": [0.0, -0.0, 0.0, -0.0, -1.0],
}


@pytest.mark.parametrize("name", ODD_ROWS)
def test_odd_rows_are_drawn_as_by_the_twin(name: str, kernel_device: torch.device) -> None:
    settings: list[dict[str, Any]] = [{}, {"temperature": 0}, {"top_k": 2}, {"min_p": 0.3}]
    row = torch.tensor(ODD_ROWS[name], device=kernel_device)
    positions = torch.arange(len(settings), device=kernel_device)[:, None]
    for some in (settings[:2], settings):
        batch = batch_of(some, len(row), kernel_device)
        logits = row.expand(len(some), 1, -1)
        wanted = draw_plain(logits, positions[: len(some)], batch)
        assert torch.equal(draw_kernel(logits, positions[: len(some)], batch), wanted)


def test_greedy_ties_go_to_the_lowest_id(kernel_device: torch.device) -> None:
    logits = torch.zeros(1, 2, 400, device=kernel_device)
    logits[0, 0, [130, 131, 399]] = 2.0
    batch = batch_of([{"temperature": 0}], 400, kernel_device)
    positions = torch.tensor([[3, 4]], device=kernel_device)
    for launch in (None, small(400)):
        assert draw_kernel(logits, positions, batch, launch).tolist() == [[130, 0]]


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (-(1 << 63), 1), ((1 << 63) - 1, 1 << 30)])
def test_the_noise_is_that_of_the_plain_function(
    seed: int, position: int, kernel_device: torch.device
) -> None:
    """Logits that only just make up for the noise's differences: each id in turn is drawn."""
    width = 24
    keys = row_keys(torch.tensor([seed]), torch.tensor([position]))
    noise = exponential(keys, width).log().double()
    requests = [SamplingRequest(SamplingParams(), seed)] * width
    batch = SamplingBatch.build(requests, width, kernel_device)
    rows = noise.expand(width, -1) + 1e-4 * torch.eye(width, dtype=torch.float64)
    positions = torch.full((width, 1), position, device=kernel_device)
    drawn = draw_kernel(rows.float()[:, None].to(kernel_device), positions, batch)
    assert drawn.flatten().tolist() == list(range(width))


def test_thresholds_keep_what_the_twin_keeps(kernel_device: torch.device) -> None:
    """Ties among few values, and as many tokens as a nucleus can hold."""
    settings = [{"top_k": k, "top_p": p} for k, p in itertools.product((1, 64, 499), (0.05, 0.9))]
    logits, _ = inputs(len(settings), 1, 500, FP32, kernel_device)
    for values in (logits, logits.round(), torch.zeros_like(logits)):
        batch = batch_of(settings, 500, kernel_device)
        rows = values.flatten(0, 1)
        x = temper(rows.float(), batch.temperature)
        kept = filter_logits(
            x,
            batch.top_k,
            batch.top_p,
            batch.log_min_p,
            max_top_k=batch.max_top_k,
            any_top_p=True,
            any_min_p=False,
            top_p_within_top_k=True,
        ).isfinite()
        peaks = rows.float().amax(-1, keepdim=True)
        logit, weight = _thresholds(rows, peaks, 1, batch)
        # Weights of the last kept token, by a kernel's exponential and by PyTorch's.
        assert torch.equal((x >= logit[:, None]) & (x.exp() >= weight[:, None] * (1 - 1e-6)), kept)


def test_weights_are_held_for_a_bounded_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device
) -> None:
    settings = SETTINGS["all"]
    logits, positions = inputs(len(settings), 3, 100, FP32, kernel_device)
    batch = batch_of(settings, 100, kernel_device)
    whole = draw_kernel(logits, positions, batch)
    monkeypatch.setattr("knockon.engine.fused.draw._MOST_SCRATCH", 128 * 3)
    assert torch.equal(draw_kernel(logits, positions, batch), whole)


def test_launches_cover_every_row_and_keep_a_device_busy() -> None:
    for rows, width in itertools.product((1, 16, 512, 1024, 9000), (1, 70, 49152, 151936, 248320)):
        launch = draw_launch(rows, width)
        assert launch.tile * launch.tiles * launch.chunks >= width
        assert launch.tile * launch.tiles * (launch.chunks - 1) < width
    assert draw_launch(1, 248320).chunks == 243
    assert draw_launch(1024, 49152).chunks == 4


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("shape", [(64, 1, 49152), (5, 16, 151936)])
def test_served_sizes_equal_the_twin(
    name: str, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    device = torch.device("cuda")
    requests, rows, width = shape
    settings = (SETTINGS[name] * requests)[:requests]
    logits, positions = inputs(requests, rows, width, dtype, device)
    batch = batch_of(settings, width, device)
    wanted, got = draw_plain(logits, positions, batch), draw_kernel(logits, positions, batch)
    assert torch.equal(got, wanted)
