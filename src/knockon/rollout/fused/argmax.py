"""The best position of every row of logits, read once."""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from knockon.rollout.fused.keys import padding_key
from knockon.rollout.fused.select_kernels import _keys
from knockon.triton_backend import jit, power_of_two, runs_on, tl

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Programs at a time that keep a large device's memory busy.
_PROGRAMS = 2048


@dataclass(frozen=True)
class ArgmaxLaunch:
    """Launch settings.

    Attributes:
        tile: logits at a time, a power of two. tiles: of one program. chunks: programs a row.
    """

    tile: int
    tiles: int
    chunks: int


def argmax_launch(rows: int, width: int) -> ArgmaxLaunch:
    """Settings for ``rows`` rows of ``width`` logits: many short programs, or fewer long ones."""
    tile = min(2048, max(64, power_of_two(width)))
    of_row = -(-width // tile)
    tiles = -(-of_row // max(1, min(of_row, _PROGRAMS // rows)))
    return ArgmaxLaunch(tile, tiles, -(-of_row // tiles))


def argmax_runs_on(logits: Tensor) -> bool:
    """Whether the kernels take these logits."""
    return runs_on(logits) and logits.dtype in _DTYPES and logits.numel() > 0


def argmax_kernel(logits: Tensor, launch: ArgmaxLaunch | None = None) -> Tensor:
    """The position of the best logit along the last dimension, the lowest of ties.

    The twin is ``order.ranks(logits).argmax(-1)``.

    Args:
        logits: ``[..., V]`` BF16, FP16 or FP32, not empty; rows may lie apart.

    Returns:
        ``[...]`` int64.
    """
    width = logits.shape[-1]
    rows = logits.reshape(-1, width)
    if rows.stride(-1) != 1 and width > 1:
        rows = rows.contiguous()
    if launch is None:
        launch = argmax_launch(len(rows), width)
    best = torch.empty((len(rows), launch.chunks), dtype=torch.int64, device=rows.device)
    found = torch.empty(logits.shape[:-1], dtype=torch.int64, device=rows.device)
    stop = load_stop(rows)
    best_of_chunks[(len(rows), launch.chunks)](
        rows,
        best,
        rows.stride(0),
        width,
        stop,
        PADDING=padding_key(rows.dtype),
        CUT=stop != width,
        TILES=launch.tiles,
        TILE=launch.tile,
        num_warps=max(1, min(4, launch.tile // 256)),
    )
    best_of_rows[(len(rows),)](
        best, found, launch.chunks, CHUNKS=power_of_two(launch.chunks), num_warps=1
    )
    return found


def load_stop(rows: Tensor) -> int:
    """How many of a row's elements may be read: a multiple of 16 lets whole vectors be loaded.

    Rows cut out of wider ones are followed by elements that can be read though they do not count.
    """
    width = rows.shape[1]
    stop = -(-width // 16) * 16
    last = rows.storage_offset() + (len(rows) - 1) * rows.stride(0) + stop
    held = rows.untyped_storage().nbytes() // rows.element_size()
    return stop if last <= held and rows.stride(0) % 16 == 0 else width


@jit
def best_of_chunks(
    logits,
    best,
    row_stride,
    width,
    stop,
    PADDING: tl.constexpr,
    CUT: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """The best of one chunk of one row: its key above, 2^31 - 1 less its position below.

    Values are compared as they are, by a strict ``>``: NaN never wins and the first of equals
    stays. That leaves out chunks without anything above ``-inf``, which are read again.

    Args:
        logits: rows of which ``width`` elements count and the first ``stop`` may be read.
        best: ``[rows, chunks]`` int64.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    lane = tl.arange(0, TILE)
    first = chunk * (TILES * TILE)
    source = logits + row * row_stride
    value = tl.full([TILE], -float("inf"), tl.float32)
    at = tl.full([TILE], 2147483647, tl.int32)
    for tile in range(TILES):
        here = first + tile * TILE + lane
        x = tl.load(source + here, mask=here < stop, other=-float("inf")).to(tl.float32)
        better = x > value
        if CUT:
            better = better & (here < width)
        value = tl.where(better, x, value)
        at = tl.where(better, here, at)
    top = tl.max(value, 0)
    where = tl.min(tl.where(value == top, at, 2147483647), 0)
    key = _keys(top, logits.dtype.element_ty, PADDING)
    if top == -float("inf"):
        lowest = tl.full([TILE], 2147483647, tl.int32)
        for tile in range(TILES):
            # Other names than above: what a loop carries must keep its type.
            there = first + tile * TILE + lane
            y = tl.load(source + there, mask=there < width, other=0.0).to(tl.float32)
            lowest = tl.minimum(lowest, tl.where(y == -float("inf"), there, 2147483647))
        where = tl.min(lowest, 0)
        key = tl.where(where == 2147483647, PADDING + 1, key)
        where = tl.where(where == 2147483647, first, where)
    packed = (key.to(tl.int64) << 32) | (2147483647 - where).to(tl.int64)
    tl.store(best + row * tl.num_programs(1) + chunk, packed)


@jit
def best_of_rows(best, found, chunks, CHUNKS: tl.constexpr):
    """The position in the best of a row's chunks."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    lowest = -9223372036854775808
    packed = tl.load(best + row * chunks + chunk, mask=chunk < chunks, other=lowest)
    tl.store(found + row, 2147483647 - (tl.max(packed, 0) & 0xFFFFFFFF))
