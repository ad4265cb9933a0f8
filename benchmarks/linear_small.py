"""The small kernels among the products of ``benchmarks/linear.py``, and how graphs are timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from knockon.layers.fused.pdl import follow, pdl
from knockon.layers.fused.prefetch import prefetch_rows

BLOCK = 1024
PREFETCH_PROGRAMS = 128


@partial(triton.jit, do_not_specialize=["rows"])
def small_rows(
    source,
    target,
    weight,
    n,
    size,
    rows,
    weight_rows,
    weight_columns,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    PDL: tl.constexpr,
):
    """``target [rows, size]`` from the rows' first ``size`` elements, over again if fewer.

    The last programs ask for the first pieces of the rows of the weight that is wanted next.
    """
    blocks = tl.cdiv(size, BLOCK)
    program = tl.program_id(0)
    if PIECES > 0 and program >= rows * blocks:
        share = tl.cdiv(weight_rows, tl.num_programs(0) - rows * blocks)
        begin = (program - rows * blocks) * share
        step: tl.constexpr = 128 // PIECES
        for row in range(begin, begin + share, step):
            prefetch_rows(
                weight, row, weight_rows, weight_columns, 0, weight_columns, step, PIECES, 2
            )
    follow(PDL)
    if program < rows * blocks:
        row = program // blocks
        at = program % blocks * BLOCK + tl.arange(0, BLOCK)
        live = at < size
        value = tl.load(source + row * n + at % n, mask=live, other=0.0).to(tl.float32)
        value = 2 * value / (1 + tl.abs(value))
        tl.store(target + row * size + at, value.to(target.dtype.element_ty), mask=live)


def small(
    source: Tensor, size: int, early: bool, weight: Tensor | None = None, pieces: int = 0
) -> Tensor:
    rows, n = source.shape
    target = source.new_empty((rows, size))
    programs = rows * -(-size // BLOCK)
    if weight is not None:
        programs += PREFETCH_PROGRAMS
    small_rows[(programs,)](
        source,
        target,
        source if weight is None else weight,
        n,
        size,
        rows,
        *((16, 16) if weight is None else weight.shape),
        BLOCK=BLOCK,
        PIECES=0 if weight is None else pieces,
        num_warps=4,
        **(pdl(source) if early else {"PDL": False}),
    )
    return target


def replay_us(run: Callable[[], Any], rounds: int, seconds: float) -> tuple[float, Tensor]:
    """Median time of a replay of ``run``, and what it returned, which each replay writes anew."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()  # without the clean-up of torch.cuda.graph, for there are hundreds
        result = run()
        graph.capture_end()
    torch.cuda.synchronize()

    def milliseconds(replays: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / replays

    milliseconds(1)
    replays = max(3, int(seconds * 1000 / milliseconds(2)))
    spent = statistics.median(milliseconds(replays) for _ in range(rounds)) * 1000
    copy = result.clone()
    torch.cuda.synchronize()
    return spent, copy
