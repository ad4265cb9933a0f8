"""The ids that can be in the pool: a short list out of all scores.

The ``want``-th best of the groups' bests bounds the pool's cutoff from below: ``want`` ids reach
it. How many more do depends on the data. Lists have room for all ids; long ones are slow, not
wrong. With fewer than ``want`` groups all ids are listed.

A kernel of a few microseconds is bound by the instructions of one multiprocessor, so every program
of a request repeats only the search for the bound, and lists its own slice of the groups.
"""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from knockon.rollout.fused.best_kernels import choose_part, kth_largest
from knockon.rollout.fused.select_kernels import finish_request
from knockon.triton_backend import jit, tl


@jit
def _ones(bits):
    """How many bits of an int32 are set; compiled to one instruction."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24) & 0xFF


@jit
def _bound(best, live, groups, want):
    """What at least ``want`` ids reach: any, where there are fewer groups than that."""
    bound = kth_largest(best, live, tl.minimum(want, groups), 1 << 32)
    return tl.where(want > groups, -2147483648, bound)


@jit
def _read(scores, listed, live, GROUP: tl.constexpr, WORD: tl.constexpr):
    """Of words, each of the group at its place in ``listed``: first ids, keys ``[words, WORD]``."""
    at = listed * GROUP + tl.arange(0, listed.shape[0]) % (GROUP // WORD) * WORD
    here = at[:, None] + tl.arange(0, WORD)[None, :]
    return at, tl.load(scores + here, mask=live[:, None], other=0)


@jit
def _append(scores, list_keys, list_ids, count, at, keys, live, bound):
    """List the ids of live words that reach the bound, from place ``count``; the new count.

    Few ids of a word do, so words are turned to bits, and the lowest of each is listed at a time.
    """
    bit = tl.arange(0, keys.shape[1])[None, :]
    reaches = live[:, None] & (keys.to(tl.int32) >= bound)
    bits = tl.sum(reaches.to(tl.int32) << bit, 1)
    ones = _ones(bits)
    to = count + tl.cumsum(ones, 0) - ones
    for _ in range(tl.max(ones, 0)):
        here = bits != 0
        entry = at + _ones((bits & -bits) - 1)
        tl.store(list_keys + to, tl.load(scores + entry, mask=here, other=0), mask=here)
        tl.store(list_ids + to, entry, mask=here)
        bits &= bits - 1
        to += 1
    return count + tl.sum(ones, 0)


@jit
def list_groups(
    scores,
    group_best,
    group_ids,
    list_keys,
    list_ids,
    counts,
    groups,
    want,
    capacity,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """List the ids that reach the bound; one program a request and slice of its groups.

    Args:
        scores, group_best: from ``scan_rows``; ``groups`` a request, the ``want``-th best of which
            is the bound.
        group_ids: ``[B, PARTS, GROUPS / PARTS]`` int32, scratch.
        list_keys, list_ids: ``[B, PARTS, capacity]``, filled from the left, ids ascending.
        counts: ``[B, PARTS]`` int32, how far.
        TILE: groups whose keys are read at a time. A slice of as many is read whole, before the
            bound is known; of a larger one, only the groups that reach the bound.
    """
    request = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    SLICE: tl.constexpr = GROUPS // PARTS
    # A word's ids are the bits of one integer.
    WORD: tl.constexpr = 32 if GROUP > 32 else GROUP
    WORDS: tl.constexpr = GROUP // WORD
    scores += request * groups * GROUP
    group_best += request * groups
    group_ids += (request * PARTS + part) * SLICE
    list_keys += (request * PARTS + part) * capacity
    list_ids += (request * PARTS + part) * capacity

    group = tl.arange(0, GROUPS)
    live = group < groups
    best = tl.load(group_best + group, mask=live, other=0).to(tl.int32)
    best = tl.where(live, best, -2147483648)
    count = tl.full([], 0, tl.int32)
    if SLICE <= TILE:
        entry = part * SLICE + tl.arange(0, SLICE * WORDS) // WORDS
        here = entry < groups
        at, keys = _read(scores, entry, here, GROUP, WORD)
        bound = _bound(best, live, groups, want)
        count = _append(scores, list_keys, list_ids, count, at, keys, here, bound)
    else:
        own = part * SLICE + tl.arange(0, SLICE)
        own_best = tl.load(group_best + own, mask=own < groups, other=0).to(tl.int32)
        bound = _bound(best, live, groups, want)
        listed = ((own < groups) & (own_best >= bound)).to(tl.int32)
        place = tl.cumsum(listed, 0) - listed
        tl.store(group_ids + place, own, mask=listed > 0)
        mine = tl.sum(listed, 0)
        tl.debug_barrier()  # the program reads back what it wrote

        slot = tl.arange(0, TILE * WORDS) // WORDS
        here = slot < mine
        entry = tl.load(group_ids + slot, mask=here, other=0)
        at, keys = _read(scores, entry, here, GROUP, WORD)
        for first in range(0, mine, TILE):
            # The next keys are on their way while these are listed.
            ahead = first + TILE + slot
            next_here = ahead < mine
            entry = tl.load(group_ids + ahead, mask=next_here, other=0)
            next_at, next_keys = _read(scores, entry, next_here, GROUP, WORD)
            count = _append(scores, list_keys, list_ids, count, at, keys, here, bound)
            at, keys, here = next_at, next_keys, next_here
    tl.store(counts + request * PARTS + part, count)


@jit
def choose_listed(
    list_keys,
    list_ids,
    counts,
    row_best,
    row_best_at,
    nan_masks,
    out_keys,
    out_ids,
    prefix_keys,
    prefix_ids,
    nan_rows,
    k,
    capacity,
    chunks,
    start,
    PADDING: tl.constexpr,
    ROWS: tl.constexpr,
    PREFIX: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """The ``k`` best of what :func:`list_groups` listed; one program a request and list.

    One more program a request does what ``finish_rows`` does, beside the others.
    """
    request = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if part < PARTS:
        choose_part(
            list_keys + request * PARTS * capacity,
            list_ids + request * PARTS * capacity,
            out_keys + request * k,
            out_ids + request * k,
            part,
            tl.load(counts + request * PARTS + tl.arange(0, PARTS)),
            k,
            capacity,
            PARTS * capacity,
            start,
            PADDING,
            True,
            PARTS,
            TILE,
            STRIDE,
        )
    else:
        finish_request(
            request,
            row_best,
            row_best_at,
            nan_masks,
            prefix_keys,
            prefix_ids,
            nan_rows,
            chunks,
            start,
            PADDING,
            ROWS,
            PREFIX,
            CHUNKS,
        )
