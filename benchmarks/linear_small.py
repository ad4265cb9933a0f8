"""The small kernels among the products of ``benchmarks/linear.py``."""

from __future__ import annotations

from functools import partial

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
