"""The exact k best of lists of (key, id), one program per request.

The cutoff is found by bisection over the keys, which stay in registers; ties at it go to the first
in the list. A list too long for registers is streamed once per step of the bisection instead:
slower, equally exact.
"""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from knockon.rollout.fused.backend import jit, tl


@jit
def middle(low, high):
    """The upper middle of two int32, without overflow."""
    return ((low.to(tl.int64) + high.to(tl.int64) + 1) >> 1).to(tl.int32)


@jit
def kth_largest(keys, live, want):
    """The largest value that at least ``want`` of the live ``keys`` reach; ``want`` are live."""
    low = tl.min(tl.where(live, keys, 2147483647), 0)
    high = tl.max(tl.where(live, keys, -2147483648), 0)
    while low < high:
        mid = middle(low, high)
        enough = tl.sum((live & (keys >= mid)).to(tl.int32), 0) >= want
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
def _write(
    out_keys,
    out_ids,
    place,
    keys,
    ids,
    wins,
    PADDING: tl.constexpr,
    WITH_KEYS: tl.constexpr,
):
    tl.store(out_ids + place, ids, mask=wins)
    if WITH_KEYS:
        tl.store(out_keys + place, tl.where(keys == PADDING, -2147483648, keys), mask=wins)


@jit
def choose_best(
    list_keys,
    list_ids,
    counts,
    out_keys,
    out_ids,
    k,
    capacity,
    start,
    PADDING: tl.constexpr,
    PARTS: tl.constexpr,
    COUNTED: tl.constexpr,
    WITH_KEYS: tl.constexpr,
    TILE: tl.constexpr,
):
    """``PARTS`` lists a request, each ``capacity`` wide, of which ``counts`` entries are live.

    Args:
        list_keys, list_ids: ``[B, PARTS, capacity]``, ids ascending where keys are equal.
        counts: ``[B, PARTS]`` int32; without ``COUNTED`` all of ``capacity`` is live.
        out_keys, out_ids: ``[B, k]`` int32, in the order of the lists; ids plus ``start``.
    """
    request = tl.program_id(0).to(tl.int64)
    list_keys += request * PARTS * capacity
    list_ids += request * PARTS * capacity
    counts += request * PARTS
    out_keys += request * k
    out_ids += request * k

    SHARE: tl.constexpr = TILE // PARTS
    entry = tl.arange(0, TILE)
    part = tl.arange(0, PARTS)
    count = tl.load(counts + part) if COUNTED else part * 0 + capacity
    if tl.max(count, 0) <= SHARE:
        offset = tl.arange(0, SHARE)[None, :]
        source = part[:, None] * capacity + offset
        # Whole vectors, what lies past the count included: that mask would make every load scalar.
        inside = (part >= 0)[:, None] & (offset < capacity)
        live = tl.reshape(offset < count[:, None], [TILE])
        keys = tl.load(list_keys + source, mask=inside, other=PADDING)
        keys = tl.where(live, tl.reshape(keys, [TILE]).to(tl.int32), PADDING)
        ids = tl.reshape(tl.load(list_ids + source, mask=inside, other=0), [TILE])
        cutoff = kth_largest(keys, live, k)
        above = live & (keys > cutoff)
        ties = k - tl.sum(above.to(tl.int32), 0)
        wins, place = places(above, live & (keys == cutoff), ties)
        _write(out_keys, out_ids, place, keys, ids + start, wins, PADDING, WITH_KEYS)
    else:
        low = tl.full([], 2147483647, tl.int32)
        high = tl.full([], -2147483648, tl.int32)
        for p in range(PARTS):
            n = tl.load(counts + p) if COUNTED else capacity
            for first in range(0, n, TILE):
                here = first + entry < n
                keys = tl.load(list_keys + p * capacity + first + entry, mask=here, other=PADDING)
                keys = keys.to(tl.int32)
                low = tl.minimum(low, tl.min(tl.where(here, keys, 2147483647), 0))
                high = tl.maximum(high, tl.max(keys, 0))
        while low < high:
            mid = middle(low, high)
            reached = tl.zeros([TILE], tl.int32)
            for p in range(PARTS):
                n = tl.load(counts + p) if COUNTED else capacity
                for first in range(0, n, TILE):
                    here = first + entry < n
                    keys = tl.load(
                        list_keys + p * capacity + first + entry, mask=here, other=PADDING
                    )
                    reached += (keys.to(tl.int32) >= mid).to(tl.int32)
            enough = tl.sum(reached, 0) >= k
            low = tl.where(enough, mid, low)
            high = tl.where(enough, high, mid - 1)
        better = tl.zeros([TILE], tl.int32)
        for p in range(PARTS):
            n = tl.load(counts + p) if COUNTED else capacity
            for first in range(0, n, TILE):
                here = first + entry < n
                keys = tl.load(list_keys + p * capacity + first + entry, mask=here, other=PADDING)
                better += (keys.to(tl.int32) > low).to(tl.int32)
        ties = k - tl.sum(better, 0)
        written = tl.full([], 0, tl.int32)
        for p in range(PARTS):
            n = tl.load(counts + p) if COUNTED else capacity
            for first in range(0, n, TILE):
                here = first + entry < n
                at = p * capacity + first + entry
                keys = tl.load(list_keys + at, mask=here, other=PADDING).to(tl.int32)
                ids = tl.load(list_ids + at, mask=here, other=0)
                equal = here & (keys == low)
                wins, place = places(keys > low, equal, ties)
                _write(
                    out_keys, out_ids, written + place, keys, ids + start, wins, PADDING, WITH_KEYS
                )
                written += tl.sum(wins.to(tl.int32), 0)
                ties = tl.maximum(ties - tl.sum(equal.to(tl.int32), 0), 0)
