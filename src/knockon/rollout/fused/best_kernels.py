"""The exact k best of lists of (key, id), several programs a request.

The cutoff is found by bisection over the keys, which stay in registers; ties at it go to the first
in the lists. Lists too long for registers are streamed once per step of the bisection instead:
slower, equally exact. Every program finds the cutoff, which costs less than another launch, and
writes the winners of one list.
"""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from knockon.triton_backend import jit, tl


@jit
def next_guess(low, high, stride):
    """The upper middle of two int32, or less where ``stride``, int64, is shorter."""
    half = (high.to(tl.int64) - low.to(tl.int64) + 1) >> 1
    return low + tl.minimum(half, stride).to(tl.int32)


@jit
def kth_largest(keys, live, want, STRIDE: tl.constexpr):
    """The largest value that at least ``want`` of ``keys`` reach; at least ``want`` are live.

    What is not live is the least int32. The first steps, ``STRIDE`` and its multiples by four, are
    from below: few where the value is known to be low.
    """
    stride = tl.full([], STRIDE, tl.int64)
    low = tl.min(tl.where(live, keys, 2147483647), 0)
    high = tl.max(keys, 0)
    while low < high:
        mid = next_guess(low, high, stride)
        stride = tl.minimum(stride, 1 << 32) * 4
        enough = tl.sum((keys >= mid).to(tl.int32), 0) >= want
        low = tl.where(enough, mid, low)
        high = tl.where(enough, high, mid - 1)
    return low


@jit
def places(above, equal, ties):
    """Of a flat tile: which entries win (all above, the first ``ties`` equal), and their places.

    One scan serves both counts, 16 bits each, so a tile may hold at most 32,768 entries.
    """
    flags = above.to(tl.int32) | (equal.to(tl.int32) << 16)
    before = tl.cumsum(flags, 0) - flags
    equal_before = (before >> 16) & 0xFFFF
    wins = above | (equal & (equal_before < ties))
    return wins, (before & 0xFFFF) + tl.minimum(equal_before, ties)


@jit
def _tile(
    list_keys,
    count,
    first,
    capacity,
    limit,
    PADDING: tl.constexpr,
    PARTS: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Entries ``first`` to ``first + SHARE`` of every list, flat, and which of them are live."""
    offset = first + tl.arange(0, SHARE)[None, :]
    source = tl.arange(0, PARTS)[:, None] * capacity + offset
    # Whole vectors, what lies past a count included: that mask would make every load scalar.
    keys = tl.load(list_keys + source, mask=source < limit, other=PADDING).to(tl.int32)
    live = offset < count[:, None]
    keys = tl.where(live, keys, -2147483648)
    return tl.reshape(keys, [PARTS * SHARE]), tl.reshape(live, [PARTS * SHARE])


@jit
def _census(keys, live, cutoff, part, PARTS: tl.constexpr, SHARE: tl.constexpr):
    """Of a tile, two counts each, 16 bits apart: entries above and at the cutoff.

    All above and none at it; then of the lists before ``part`` alone.
    """
    before = tl.arange(0, PARTS * SHARE) // SHARE < part
    above = keys > cutoff
    equal = before & live & (keys == cutoff)
    mine = (before & above).to(tl.int32) | (equal.to(tl.int32) << 16)
    return tl.sum(above.to(tl.int32), 0), tl.sum(mine, 0)


@jit
def choose_part(
    list_keys,
    list_ids,
    out_keys,
    out_ids,
    part,
    count,
    k,
    capacity,
    limit,
    start,
    PADDING: tl.constexpr,
    WITH_KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """The winners of list ``part`` among the ``k`` best of all ``PARTS`` lists of a request.

    Args:
        list_keys, list_ids: the request's lists, ``capacity`` apart, ids ascending where keys are
            equal; ``limit`` entries may be read.
        count: ``[PARTS]``, entries of each list.
        out_keys, out_ids: ``[k]`` int32 of the request, in the order of the lists; ids plus
            ``start``.
    """
    SHARE: tl.constexpr = TILE // PARTS
    entry = tl.arange(0, SHARE)
    list_ids += part * capacity
    n = tl.sum(tl.where(tl.arange(0, PARTS) == part, count, 0), 0)
    # The first of what is written below is read before the cutoff is known.
    own_keys = tl.load(list_keys + part * capacity + entry, mask=entry < n, other=PADDING)
    own_ids = tl.load(list_ids + entry, mask=entry < n, other=0)

    most = tl.max(count, 0)
    if most <= SHARE:
        keys, live = _tile(list_keys, count, 0, capacity, limit, PADDING, PARTS, SHARE)
        cutoff = kth_largest(keys, live, k, STRIDE)
        above, mine = _census(keys, live, cutoff, part, PARTS, SHARE)
        above_before = mine & 0xFFFF
        equal_before = mine >> 16
    else:
        cutoff = tl.full([], 2147483647, tl.int32)
        high = tl.full([], -2147483648, tl.int32)
        for first in range(0, most, SHARE):
            keys, live = _tile(list_keys, count, first, capacity, limit, PADDING, PARTS, SHARE)
            cutoff = tl.minimum(cutoff, tl.min(tl.where(live, keys, 2147483647), 0))
            high = tl.maximum(high, tl.max(keys, 0))
        stride = tl.full([], STRIDE, tl.int64)
        while cutoff < high:
            mid = next_guess(cutoff, high, stride)
            stride = tl.minimum(stride, 1 << 32) * 4
            reached = tl.zeros([TILE], tl.int32)
            for first in range(0, most, SHARE):
                keys, live = _tile(list_keys, count, first, capacity, limit, PADDING, PARTS, SHARE)
                reached += (keys >= mid).to(tl.int32)
            enough = tl.sum(reached, 0) >= k
            cutoff = tl.where(enough, mid, cutoff)
            high = tl.where(enough, high, mid - 1)
        above = tl.full([], 0, tl.int32)
        above_before = tl.full([], 0, tl.int32)
        equal_before = tl.full([], 0, tl.int32)
        for first in range(0, most, SHARE):
            keys, live = _tile(list_keys, count, first, capacity, limit, PADDING, PARTS, SHARE)
            above_here, mine = _census(keys, live, cutoff, part, PARTS, SHARE)
            above += above_here
            above_before += mine & 0xFFFF
            equal_before += mine >> 16

    ties = k - above
    written = above_before + tl.minimum(equal_before, ties)
    ties = tl.maximum(ties - equal_before, 0)
    for first in range(0, n, SHARE):
        here = first + entry < n
        if first > 0:
            own_keys = tl.load(list_keys + part * capacity + first + entry, mask=here, other=0)
            own_ids = tl.load(list_ids + first + entry, mask=here, other=0)
        keys = own_keys.to(tl.int32)
        equal = here & (keys == cutoff)
        wins, place = places(here & (keys > cutoff), equal, ties)
        tl.store(out_ids + written + place, own_ids + start, mask=wins)
        if WITH_KEYS:
            shown = tl.where(keys == PADDING, -2147483648, keys)
            tl.store(out_keys + written + place, shown, mask=wins)
        both = tl.sum(wins.to(tl.int32) | (equal.to(tl.int32) << 16), 0)
        written += both & 0xFFFF
        ties = tl.maximum(ties - (both >> 16), 0)


@jit
def choose_best(
    keys,
    ids,
    out_ids,
    k,
    entries,
    capacity,
    PADDING: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """The ids of the ``k`` best of one list a request, cut into ``PARTS`` of ``capacity``.

    One program a request and part. ``keys``, ``ids`` are ``[B, entries]``, ids ascending where keys
    are equal; ``out_ids`` is ``[B, k]``, in the order of the list.
    """
    request = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    left = entries - tl.arange(0, PARTS) * capacity
    count = tl.minimum(tl.maximum(left, 0), capacity)
    choose_part(
        keys + request * entries,
        ids + request * entries,
        out_ids,
        out_ids + request * k,
        part,
        count,
        k,
        capacity,
        entries,
        0,
        PADDING,
        False,
        PARTS,
        TILE,
        STRIDE,
    )
