"""Drawing tokens in a few launches; the plain twin is ``sampling.draw_plain``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from knockon.engine.fused.draw_kernels import best_of_chunks, draw_from_chunks, peaks_of_chunks
from knockon.engine.fused.threshold_kernel import thresholds_of_rows
from knockon.layers.fused.pdl import pdl
from knockon.triton_backend import interpreted, power_of_two, runs_on

if TYPE_CHECKING:
    from knockon.engine.sampling import SamplingBatch

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Programs at a time that keep a large device busy to the end.
_PROGRAMS = 4096
_TILE = 1024
_THRESHOLD_TILE = 4096
# Elements of the weights that top-k and top-p keep at once; more rows are taken in turns.
_MOST_SCRATCH = 1 << 26


@dataclass(frozen=True)
class DrawLaunch:
    """Launch settings.

    Attributes:
        tile: logits at a time, a power of two. tiles: of one program. chunks: programs a row.
        warps: of a program.
    """

    tile: int
    tiles: int
    chunks: int
    warps: int


def draw_launch(rows: int, width: int) -> DrawLaunch:
    """Settings for ``rows`` rows of ``width`` logits. What is drawn does not depend on them."""
    tile = min(_TILE, max(64, power_of_two(width)))
    of_row = -(-width // tile)
    tiles = -(-of_row // max(1, min(of_row, _PROGRAMS // rows)))
    return DrawLaunch(tile, tiles, -(-of_row // tiles), max(1, tile // 256))


def draw_runs_on(logits: Tensor) -> bool:
    """Whether the kernels take these logits; they call functions of CUDA's library."""
    nvidia = runs_on(logits) and torch.version.hip is None
    return nvidia and logits.dtype in _DTYPES and logits.numel() > 0


def draw_kernel(
    logits: Tensor, positions: Tensor, batch: SamplingBatch, launch: DrawLaunch | None = None
) -> Tensor:
    """One token at every row, by the noise of its request's seed and its position.

    Three launches, or four with top-k or top-p; nothing is read back. FP32 throughout. The draw
    equals the twin's but where two scores, or a nucleus's mass and its bound, tie to within the
    rounding of sums and logarithms.

    Args:
        logits: ``[B, w, V]`` BF16, FP16 or FP32, not empty, penalties and bad words applied.
        positions: int64 ``[B, w]``.
        batch: of the ``B`` requests.

    Returns:
        int64 ``[B, w]``.
    """
    width = logits.shape[-1]
    rows = logits.reshape(-1, width)
    if rows.stride(-1) != 1 and width > 1:
        rows = rows.contiguous()
    positions = positions.contiguous()
    count, per_request = len(rows), positions.shape[1]
    if launch is None:
        launch = draw_launch(count, width)
    chunks, block = launch.chunks, _chunk_block(launch.chunks)
    options = {"TILE": launch.tile, "num_warps": launch.warps, **pdl(rows)}
    peaks = torch.empty((count, chunks), dtype=torch.float32, device=rows.device)
    best = torch.empty((count, chunks), dtype=torch.int64, device=rows.device)
    drawn = torch.empty_like(positions)
    peaks_of_chunks[(count, chunks)](rows, peaks, rows.stride(0), width, launch.tiles, **options)
    top_k = batch.max_top_k > 0
    least_logits, least_weights = peaks, peaks
    if top_k or batch.any_top_p:
        least_logits, least_weights = _thresholds(rows, peaks, per_request, batch)
    draw_from_chunks[(count, chunks)](
        rows,
        peaks,
        batch.seed,
        positions,
        batch.temperature,
        batch.log_min_p,
        least_logits,
        least_weights,
        best,
        rows.stride(0),
        width,
        per_request,
        launch.tiles,
        batch.seed.stride(0),
        batch.temperature.stride(0),
        batch.log_min_p.stride(0),
        TOP_K=top_k,
        TOP_P=batch.any_top_p,
        MIN_P=batch.any_min_p,
        DEVICE=not interpreted(),
        CHUNKS=block,
        **options,
    )
    best_of_chunks[(count,)](best, drawn, chunks, CHUNKS=block, num_warps=1, **pdl(rows))
    return drawn


def _chunk_block(chunks: int) -> int:
    """Chunks that a program reads at once: one size for nearly all, so that kernels are few."""
    return max(256, power_of_two(chunks))


def _thresholds(
    rows: Tensor, peaks: Tensor, per_request: int, batch: SamplingBatch
) -> tuple[Tensor, Tensor]:
    """The least tempered logit and the least weight that each of ``rows [N, V]`` keeps."""
    count, width = rows.shape
    tile = min(_THRESHOLD_TILE, max(64, power_of_two(width)))
    tiles = -(-width // tile)
    requests = count // per_request
    at_once = max(1, _MOST_SCRATCH // (tiles * tile * per_request))
    scratch = torch.empty(
        (min(at_once, requests) * per_request, tiles * tile),
        dtype=torch.float32,
        device=rows.device,
    )
    least_logits, least_weights = torch.empty(
        (2, count), dtype=torch.float32, device=rows.device
    ).unbind()
    for begin in range(0, requests, at_once):
        end = min(begin + at_once, requests)
        first, last = begin * per_request, end * per_request
        thresholds_of_rows[(last - first,)](
            rows[first:last],
            peaks[first:last],
            batch.temperature[begin:end],
            batch.top_k[begin:end],
            batch.top_p[begin:end],
            scratch,
            least_logits[first:last],
            least_weights[first:last],
            rows.stride(0),
            width,
            per_request,
            peaks.shape[1],
            batch.temperature.stride(0),
            batch.top_k.stride(0),
            batch.top_p.stride(0),
            tiles,
            TOP_K=batch.max_top_k > 0,
            TOP_P=batch.any_top_p,
            DEVICE=not interpreted(),
            CHUNKS=_chunk_block(peaks.shape[1]),
            TILE=tile,
            num_warps=max(1, tile // 256),
            **pdl(rows),
        )
    return least_logits, least_weights
