"""A short convolution of a few rows out of registers, as part of a kernel."""

# Kernel signatures are Triton's, not Python's, and so are tuples that grow.
# mypy: disable-error-code="no-untyped-def,assignment"

from __future__ import annotations

from knockon.triton_backend import jit, tl


@jit
def rows_and_those_before(
    rows,
    before,
    slots,
    starts,
    request,
    first,
    count,
    row_request,
    row_stride,
    slot_stride,
    start_stride,
    channels,
    channel,
    live,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    BEGINS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Channels ``[heads, D]`` of the ``TAPS - 1`` rows before ``first`` and of ``ROWS`` from it on.

    All are asked for at once, last those before row 0: the slot's, or zero where a request begins.
    """
    ours = ()
    for place in tl.static_range(TAPS - 1 + ROWS):
        t = first + place - (TAPS - 1)
        source = tl.multiple_of(request * row_request + t * row_stride, ALIGNED)
        known = live & (t[None, None] >= 0) & (t[None, None] < count)
        ours += (tl.load(rows + source + channel, mask=known, other=0.0),)
    slot = tl.load(slots + request * slot_stride, mask=first < TAPS - 1, other=0)
    stored = live
    if BEGINS:
        stored = live & (tl.load(starts + request * start_stride)[None, None] != 0)
    window = ()
    for place in tl.static_range(TAPS - 1):
        t = first + place - (TAPS - 1)
        old = before + (slot * (TAPS - 1) + first + place) * channels + channel
        behind = tl.load(old, mask=stored & (t[None, None] < 0), other=0.0)
        window += (tl.where(t < 0, behind, ours[place]),)
    for place in tl.static_range(TAPS - 1, TAPS - 1 + ROWS):
        window += (ours[place],)
    return window


@jit
def taps_of(conv, channels, channel, live, TAPS: tl.constexpr):
    """Some channels' filters."""
    taps = ()
    for tap in tl.static_range(TAPS):
        taps += (tl.load(conv + tap * channels + channel, mask=live, other=0.0),)
    return taps


@jit
def convolved(window, taps, t: tl.constexpr, TAPS: tl.constexpr):
    """``SiLU`` of the convolution at the window's row ``t``; sums in the taps' order."""
    total = window[t].to(tl.float32) * taps[0]
    for tap in tl.static_range(1, TAPS):
        total = tl.fma(window[t + tap].to(tl.float32), taps[tap], total)
    return total * tl.sigmoid(total)
