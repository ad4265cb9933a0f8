"""A linear layer of few rows, which is reading its weight: deep pipeline, early start."""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from knockon.layers.fused.dispatch import fuses
from knockon.layers.fused.pdl import follow, pdl
from knockon.layers.fused.prefetch import prefetch_rows
from knockon.layers.fused.silu_mul import silu_mul, silu_mul_plain
from knockon.layers.fused.stream_launch import MOST_ROWS, StreamLaunch, linear_launch
from knockon.triton_backend import interpreted, jit, power_of_two, tl

_PIECE = 512  # bytes of one prefetch


def stream_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x Wᵀ + b`` of ``x [..., K]`` and ``weight [N, K]``: ``[..., N]`` in ``x``'s dtype.

    By the kernel where it is known to win, by :func:`torch.nn.functional.linear` elsewhere.
    """
    launch = _known_to_win(x, weight, gated=False)
    if launch is not None:
        return stream_linear_kernel(x, weight, bias, launch)
    return F.linear(x, weight, bias)


def stream_gated(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``silu(gate) * other`` of ``x Wᵀ + b``, whose first half is the gate: ``[..., N / 2]``."""
    launch = _known_to_win(x, weight, gated=True)
    if launch is not None and bias is None:
        return stream_linear_kernel(x, weight, None, launch, gated=True)
    return silu_mul(stream_linear(x, weight, bias))


def _known_to_win(x: Tensor, weight: Tensor, gated: bool) -> StreamLaunch | None:
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    if 0 < rows <= MOST_ROWS and x.is_cuda and fuses(x):
        n, k = weight.shape
        return linear_launch(rows, n, k, weight.element_size(), gated)
    return None


def stream_linear_plain(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, gated: bool = False
) -> Tensor:
    """The twin of :func:`stream_linear_kernel`."""
    y = F.linear(x, weight, bias)
    return silu_mul_plain(y) if gated else y


def stream_linear_kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    launch: StreamLaunch,
    gated: bool = False,
    early: bool = True,
) -> Tensor:
    """:func:`stream_linear` with given launch settings, in one launch.

    Sums are FP32 and in an order that depends on the launch settings alone, so equal inputs give
    equal bits, and a row's result does not depend on how many rows are beside it up to the next
    power of two. Programs that share a block count each other off in a buffer of the device: calls
    with several splits must not run side by side on different streams.

    Args:
        x: ``[..., K]``, at most 64 rows.
        weight: ``[N, K]``, contiguous; rows of whole 16 bytes if ``launch.tma``. A kernel just
            before this one must not be writing to it.
        bias: ``[N]``.
        gated: ``weight`` is a gate's rows, then as many others; the result is
            ``silu(gate) * other``, ``[..., N / 2]``, rounded as by three operations.
        early: whether the kernel may start before the one ahead of it has ended.
    """
    n, k = weight.shape
    rows = x.reshape(-1, k).contiguous()
    m = rows.shape[0]
    width = n // 2 if gated else n
    out = x.new_empty((*x.shape[:-1], width))
    block_m = max(16, power_of_two(m))
    tiles = -(-width // launch.block_n)
    splits = launch.splits
    partial = arrived = out
    if splits > 1:
        planes = 2 if gated else 1
        sizes = (splits, tiles, planes, launch.block_n, block_m)
        partial = torch.empty(sizes, dtype=torch.float32, device=x.device)
        arrived = _counters(x.device, power_of_two(tiles))
    options = pdl(x) if early else {"PDL": False}
    pieces, row_bytes = 0, k * weight.element_size()
    if options["PDL"] and launch.prefetch and row_bytes >= _PIECE and row_bytes % 16 == 0:
        pieces = power_of_two(-(-launch.prefetch // _PIECE))
    blocks = weight
    if launch.tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        blocks = TensorDescriptor.from_tensor(weight, [launch.block_n, launch.block_k])
    stream_rows[(tiles, splits)](
        rows,
        weight,
        blocks,
        weight if bias is None else bias,
        out,
        partial,
        arrived,
        m,
        width,
        k,
        BIAS=bias is not None,
        GATED=gated,
        SPLIT=splits > 1,
        TMA=launch.tma,
        EVEN=k % (launch.block_k * splits) == 0 and width % launch.block_n == 0,
        PIECES=pieces,
        ITEM_BYTES=weight.element_size(),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        BLOCK_M=block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        STAGES=1 if interpreted() else launch.stages,
        num_warps=launch.warps,
        **options,
    )
    return out


@lru_cache
def _counters(device: torch.device, blocks: int) -> Tensor:
    """Programs that finished their part of each block; every launch leaves zeros."""
    return torch.zeros(blocks, dtype=torch.int32, device=device)


# ``m`` varies from step to step: one compilation for all, whatever divides it.
@jit(do_not_specialize=["m"])
def stream_rows(
    x,
    weight,
    blocks,
    bias,
    out,
    partial,
    arrived,
    m,
    n,
    k,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    PIECES: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``BLOCK_N`` columns of ``out [m, n]`` over one part of ``k``: programs ``(block, part)``.

    The weight is the first factor, so that its 64 or more rows are the tensor cores' long side.

    Args:
        x: ``[m, k]``.
        weight: ``[n, k]``, or ``[2 * n, k]`` if ``GATED``.
        blocks: the weight's descriptor, ``[BLOCK_N, BLOCK_K]`` blocks, if ``TMA``.
        partial: ``[parts, blocks, 1 or 2, BLOCK_N, BLOCK_M]`` FP32, if ``SPLIT``.
        arrived: ``[blocks]`` int32, zeros before and after, if ``SPLIT``.
        EVEN: whether ``k`` and ``n`` fill whole blocks in every part.
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    share = k
    if SPLIT:
        share = tl.cdiv(tl.cdiv(k, BLOCK_K), parts) * BLOCK_K
    first = part * share
    last = tl.minimum(first + share, k)
    if PIECES > 0:
        total = n
        if GATED:
            total = 2 * n
            prefetch_rows(
                weight, n + tile * BLOCK_N, total, k, first, k, BLOCK_N, PIECES, ITEM_BYTES
            )
        prefetch_rows(weight, tile * BLOCK_N, total, k, first, k, BLOCK_N, PIECES, ITEM_BYTES)

    row = tl.arange(0, BLOCK_M)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    # Rows of the weight past the end repeat the last; their sums are not stored.
    weight_row = tl.minimum(column, n - 1).to(tl.int64)
    weight_at = weight + (weight_row * k)[:, None] + depth[None, :]
    other_at = weight_at + n.to(tl.int64) * k
    x_at = x + (row * k)[:, None] + depth[None, :]
    live = (row < m)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    other_acc = acc
    follow(PDL)
    for k0 in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        inside = (k0 + depth < last)[None, :]
        if TMA:
            w = blocks.load([tile * BLOCK_N, k0])
        elif EVEN:
            w = tl.load(weight_at + k0)
        else:
            w = tl.load(weight_at + k0, mask=inside, other=0.0)
        if EVEN:
            values = tl.load(x_at + k0, mask=live, other=0.0)
        else:
            values = tl.load(x_at + k0, mask=live & inside, other=0.0)
        turned = tl.trans(values)
        acc = tl.dot(w, turned, acc, input_precision=PRECISION)
        if GATED:
            if TMA:
                v = blocks.load([n + tile * BLOCK_N, k0])
            elif EVEN:
                v = tl.load(other_at + k0)
            else:
                v = tl.load(other_at + k0, mask=inside, other=0.0)
            other_acc = tl.dot(v, turned, other_acc, input_precision=PRECISION)

    finished = True
    if SPLIT:
        planes: tl.constexpr = 2 if GATED else 1
        plane: tl.constexpr = BLOCK_N * BLOCK_M
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + row[None, :]
        block_at = partial + tile * (planes * plane) + inner
        part_stride = tl.num_programs(0) * (planes * plane)
        tl.store(block_at + part * part_stride, acc)
        if GATED:
            tl.store(block_at + part * part_stride + plane, other_acc)
        tl.debug_barrier()
        finished = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == parts - 1
        if finished:
            # The last to arrive adds all parts in their order, its own among them.
            tl.store(arrived + tile, 0)
            acc = tl.load(block_at, cache_modifier=".cg")
            if GATED:
                other_acc = tl.load(block_at + plane, cache_modifier=".cg")
            for i in range(1, parts):
                acc += tl.load(block_at + i * part_stride, cache_modifier=".cg")
                if GATED:
                    other_acc += tl.load(block_at + i * part_stride + plane, cache_modifier=".cg")
    if finished:
        kind: tl.constexpr = out.dtype.element_ty
        known = column < n
        if BIAS:
            acc += tl.load(bias + column, mask=known, other=0.0).to(tl.float32)[:, None]
        if GATED:
            if BIAS:
                other = tl.load(bias + n + column, mask=known, other=0.0).to(tl.float32)
                other_acc += other[:, None]
            gate = acc.to(kind).to(tl.float32)
            opened = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32)
            acc = opened * other_acc.to(kind).to(tl.float32)
        out_at = out + row[None, :] * n + column[:, None]
        tl.store(out_at, acc.to(kind), mask=known[:, None] & (row < m)[None, :])
