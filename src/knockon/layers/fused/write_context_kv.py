"""Keys and values that all draft layers take from verified tokens, to their pages at once."""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from knockon.layers.fused.dispatch import fuses
from knockon.layers.fused.heads import HEADS, copy_heads, head_sizes, turn_heads
from knockon.layers.fused.pdl import follow, pdl
from knockon.layers.rotary import Rotation
from knockon.triton_backend import jit, power_of_two, tl


def write_context_kv(
    projected: Tensor, k_norm: Tensor, eps: float, rotation: Rotation, slots: Tensor, pages: Tensor
) -> None:
    """Norm and rotate every layer's keys; write them and the values to the layers' pages.

    Args:
        projected: ``[B, T, layers * 2 * kv_heads * D]``: for each layer its keys, then its values.
        k_norm: ``[layers, D]``, weights of the key heads' RMS norms.
        rotation: of the ``[B, T]`` rows.
        slots: ``[B * T]`` int64, where each row is written in every layer.
        pages: ``[layers, 2, slots, kv_heads, D]``, contiguous: the layers' keys and values.
    """
    if fuses(projected):
        write_context_kv_kernel(projected, k_norm, eps, rotation, slots, pages)
    else:
        write_context_kv_plain(projected, k_norm, eps, rotation, slots, pages)


def write_context_kv_plain(
    projected: Tensor, k_norm: Tensor, eps: float, rotation: Rotation, slots: Tensor, pages: Tensor
) -> None:
    """The twin of :func:`write_context_kv_kernel`."""
    heads = context_heads(projected, k_norm, eps, rotation, pages.shape[3])
    for i, context in enumerate(heads):
        for layer, page in enumerate(pages[:, i]):
            page.index_copy_(0, slots, context[:, :, layer].flatten(0, 1))


def context_heads(
    projected: Tensor,
    k_norm: Tensor,
    eps: float,
    rotate: Callable[[Tensor], Tensor],
    kv_heads: int,
) -> tuple[Tensor, Tensor]:
    """``k, v`` of ``[B, T, layers, kv_heads, D]``, keys normed and rotated.

    Arguments are those of :func:`write_context_kv`; ``rotate`` turns ``[B, T, heads, D]``.
    """
    layers, dim = k_norm.shape
    k, v = projected.unflatten(-1, (layers, 2, kv_heads, dim)).unbind(3)
    k = F.rms_norm(k, (dim,), None, eps) * k_norm.unsqueeze(1)
    return rotate(k.flatten(2, 3)).view(v.shape), v


def write_context_kv_kernel(
    projected: Tensor, k_norm: Tensor, eps: float, rotation: Rotation, slots: Tensor, pages: Tensor
) -> None:
    """:func:`write_context_kv` in one launch. Positions are trusted to lie within the tables."""
    layers, _, _, kv_heads, dim = pages.shape
    rotary = rotation.rotary
    if slots.numel():
        place_context[(slots.numel(), layers * -(-kv_heads // HEADS))](
            projected.contiguous(),
            pages,
            rotary.cos,
            rotary.sin,
            rotation.positions.contiguous(),
            slots,
            k_norm,
            eps,
            pages.stride(0),
            pages.stride(1),
            layers,
            kv_heads,
            COPY_BLOCK=power_of_two(HEADS * dim),
            **head_sizes(dim, rotary.rotary_dim),
            num_warps=1,
            **pdl(pages),
        )


@jit
def place_context(
    projected,
    pages,
    cos,
    sin,
    positions,
    slots,
    gain,
    eps,
    layer_stride,
    value_stride,
    layers,
    kv_heads,
    COPY_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some key heads of one row in one layer, and the value heads beside them."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(kv_heads, HEADS)
    layer = (tl.program_id(1) // blocks).to(tl.int64)
    first = tl.program_id(1) % blocks * HEADS
    angles = tl.load(positions + row) * (2 * PAIRS)
    slot = tl.load(slots + row)
    source = projected + ((row * layers + layer) * 2 * kv_heads + first) * DIM
    target = pages + layer * layer_stride + (slot * kv_heads + first) * DIM
    turn_heads(
        source,
        target,
        kv_heads - first,
        gain + layer * DIM,
        cos + angles,
        sin + angles,
        eps,
        True,
        0,
        HEADS,
        DIM,
        PAIRS,
        PAIR_BLOCK,
        REST_BLOCK,
    )
    copy_heads(
        source + kv_heads * DIM,
        target + value_stride,
        tl.minimum(kv_heads - first, HEADS),
        COPY_BLOCK,
        DIM,
    )
