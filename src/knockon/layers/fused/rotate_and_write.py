"""Query and key heads through norm and rotation, keys and values to their pages."""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from knockon.layers.attention.base import PagedKV
from knockon.layers.fused.dispatch import fuses
from knockon.layers.fused.heads import HEADS, copy_heads, head_sizes, turn_heads
from knockon.layers.fused.pdl import follow, pdl
from knockon.layers.rotary import Rotation
from knockon.triton_backend import jit, power_of_two, tl


class HeadNorm(NamedTuple):
    """RMS norms of query and key heads, each over its own dimensions.

    Attributes:
        weight: ``[heads + kv_heads, D]``, a row a head, query heads first; in the heads' dtype or a
            wider one.
    """

    weight: Tensor
    eps: float


def rotate_and_write(
    qkv: Tensor, rotation: Rotation, slots: Tensor, kv: PagedKV, norm: HeadNorm | None
) -> Tensor:
    """From a fused projection to rotated queries, with keys and values in their pages.

    Args:
        qkv: ``[B, T, (heads + 2 * kv_heads) * D]``: query heads, key heads, value heads.
        rotation: of the ``[B, T]`` rows.
        slots: ``[B * T]`` int64, where each row's keys and values are written.
        kv: the layer's pages, which say what ``kv_heads`` and ``D`` are.
        norm: of query and key heads before rotation; ``None`` for none.

    Returns:
        The query heads ``[B, T, heads, D]``.
    """
    if fuses(qkv):
        return rotate_and_write_kernel(qkv, rotation, slots, kv, norm)
    return rotate_and_write_plain(qkv, rotation, slots, kv, norm)


def rotate_and_write_plain(
    qkv: Tensor, rotation: Rotation, slots: Tensor, kv: PagedKV, norm: HeadNorm | None
) -> Tensor:
    """The twin of :func:`rotate_and_write_kernel`."""
    kv_heads, dim = kv.k.shape[1:]
    heads = qkv.shape[-1] // dim - 2 * kv_heads
    # Query and key heads go through norm and rotation together: half the operations.
    qk, v = qkv.unflatten(-1, (-1, dim)).split_with_sizes((heads + kv_heads, kv_heads), 2)
    if norm is not None:
        wide = qk if norm.weight.dtype == qk.dtype else qk.to(norm.weight.dtype)
        qk = F.rms_norm(wide, (dim,), None, norm.eps).mul_(norm.weight).to(qk.dtype)
    q, k = rotation(qk).split_with_sizes((heads, kv_heads), 2)
    kv.write(k, v, slots)
    return q


def rotate_and_write_kernel(
    qkv: Tensor, rotation: Rotation, slots: Tensor, kv: PagedKV, norm: HeadNorm | None
) -> Tensor:
    """:func:`rotate_and_write` in one launch, which gathers the angles by itself.

    Positions are trusted to lie within the tables.
    """
    kv_heads, dim = kv.k.shape[1:]
    heads = qkv.shape[-1] // dim - 2 * kv_heads
    qkv = qkv.contiguous()
    q = qkv.new_empty((*qkv.shape[:2], heads, dim))
    rotary = rotation.rotary
    blocks = -(-heads // HEADS) + -(-kv_heads // HEADS)
    if slots.numel():
        place_rows[(slots.numel(), blocks)](
            qkv,
            q,
            kv.k,
            kv.v,
            rotary.cos,
            rotary.sin,
            rotation.positions.contiguous(),
            slots,
            qkv if norm is None else norm.weight,
            0.0 if norm is None else norm.eps,
            kv.k.stride(0),
            kv.v.stride(0),
            heads,
            kv_heads,
            NORM=norm is not None,
            COPY_BLOCK=power_of_two(HEADS * dim),
            **head_sizes(dim, rotary.rotary_dim),
            num_warps=1,
            **pdl(qkv),
        )
    return q


@jit
def place_rows(
    qkv,
    q,
    k,
    v,
    cos,
    sin,
    positions,
    slots,
    gain,
    eps,
    k_stride,
    v_stride,
    heads,
    kv_heads,
    NORM: tl.constexpr,
    COPY_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some query heads of one row, or some of its key heads and the value heads beside them."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    angles = tl.load(positions + row) * (2 * PAIRS)
    source = qkv + row * ((heads + 2 * kv_heads) * DIM)
    query_blocks = tl.cdiv(heads, HEADS)
    if block < query_blocks:
        first = block * HEADS
        turn_heads(
            source + first * DIM,
            q + (row * heads + first) * DIM,
            heads - first,
            gain + first * DIM,
            cos + angles,
            sin + angles,
            eps,
            NORM,
            DIM,
            HEADS,
            DIM,
            PAIRS,
            PAIR_BLOCK,
            REST_BLOCK,
        )
    else:
        first = (block - query_blocks) * HEADS
        slot = tl.load(slots + row)
        turn_heads(
            source + (heads + first) * DIM,
            k + slot * k_stride + first * DIM,
            kv_heads - first,
            gain + (heads + first) * DIM,
            cos + angles,
            sin + angles,
            eps,
            NORM,
            DIM,
            HEADS,
            DIM,
            PAIRS,
            PAIR_BLOCK,
            REST_BLOCK,
        )
        copy_heads(
            source + (heads + kv_heads + first) * DIM,
            v + slot * v_stride + first * DIM,
            tl.minimum(kv_heads - first, HEADS),
            COPY_BLOCK,
            DIM,
        )
