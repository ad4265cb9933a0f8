"""The last inputs of a short convolution, kept for the rows that come next."""

# Kernel signatures are Triton's, not Python's, and so are tuples that grow.
# mypy: disable-error-code="no-untyped-def,assignment"

from __future__ import annotations

from torch import Tensor

from knockon.layers.fused.pdl import follow, pdl
from knockon.layers.fused.row_strides import common_divisor
from knockon.layers.short_conv import ConvRows
from knockon.triton_backend import jit, power_of_two, tl

_BLOCK = 1024  # channels of a program


def write_tail_kernel(conv: ConvRows, lengths: Tensor | int, slots: Tensor) -> None:
    """Put what the row after the first ``lengths`` will read into ``conv.before[slots]``.

    :func:`~knockon.layers.short_conv.inputs_before` of rows and those before them, in one launch.

    Args:
        conv: ``before`` is contiguous.
        lengths: ``[B]`` int64, or a number for all.
        slots: ``[B]`` int64: the requests' own, or others' than any request's of these.
    """
    rows, starts = conv.rows, conv.starts
    batch, _, channels = rows.shape
    if isinstance(lengths, int):
        counts, number, stride = conv.slots, lengths, 0
    else:
        counts, number, stride = lengths, 0, lengths.stride(0)
    block = min(_BLOCK, power_of_two(channels))
    if conv.before.numel() and batch:
        move_tails[(batch, -(-channels // block))](
            rows,
            conv.before,
            conv.slots,
            slots,
            conv.slots if starts is None else starts,
            counts,
            number,
            rows.stride(0),
            rows.stride(1),
            conv.slots.stride(0),
            slots.stride(0),
            0 if starts is None else starts.stride(0),
            stride,
            channels,
            BEFORE=conv.before.shape[1],
            BEGINS=starts is not None,
            COUNTED=counts is lengths,
            ALIGNED=common_divisor(rows),
            BLOCK=block,
            num_warps=max(1, block // 256),
            **pdl(rows),
        )


@jit(
    do_not_specialize=[
        "length",
        "request_stride",
        "row_stride",
        "slot_stride",
        "target_stride",
        "start_stride",
        "length_stride",
    ]
)
def move_tails(
    rows,
    before,
    slots,
    targets,
    starts,
    lengths,
    length,
    request_stride,
    row_stride,
    slot_stride,
    target_stride,
    start_stride,
    length_stride,
    channels,
    BEFORE: tl.constexpr,
    BEGINS: tl.constexpr,
    COUNTED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some channels of one request."""
    follow(PDL)
    request = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < channels
    stands = tl.load(lengths + request * length_stride) if COUNTED else length.to(tl.int64)
    old = before + tl.load(slots + request * slot_stride) * BEFORE * channels + channel
    new = before + tl.load(targets + request * target_stride) * BEFORE * channels + channel
    stored = live
    if BEGINS:
        stored = live & (tl.load(starts + request * start_stride)[None] != 0)
    tail = ()
    for place in tl.static_range(BEFORE):
        t = stands + place - BEFORE
        source = tl.multiple_of(request * request_stride + t * row_stride, ALIGNED)
        ahead = tl.load(rows + source + channel, mask=live & (t[None] >= 0), other=0.0)
        behind = tl.load(old + (t + BEFORE) * channels, mask=stored & (t[None] < 0), other=0.0)
        tail += (tl.where(t < 0, behind, ahead),)
    # A slot's inputs are read by all threads before any of them is overwritten.
    tl.debug_barrier()
    for place in tl.static_range(BEFORE):
        tl.store(new + place * channels, tail[place], mask=live)
