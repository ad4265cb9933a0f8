"""Kernels that read the logits, once, and finish the rows that need no pool.

``scan_rows`` leaves, for each id, the key of its best corrected row, and the best of each group of
``GROUP`` neighbouring ids; for the prefix rows, each block's best.
"""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from knockon.triton_backend import jit, tl


@jit
def _keys(x, logits: tl.constexpr, PADDING: tl.constexpr):
    """Keys of FP32 values that the dtype ``logits`` holds exactly, int32: see ``keys.py``."""
    number = tl.where(x == 0.0, 0.0, x)
    if logits == tl.float32:
        bits = number.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        bits = number.to(logits).to(tl.int16, bitcast=True).to(tl.int32)
        key = bits ^ ((bits >> 31) & 0x7FFF)
    return tl.where(x != x, PADDING + 1, key)


@jit
def scan_rows(
    local,
    scores,
    group_best,
    row_best,
    row_best_at,
    nan_masks,
    row_stride,
    request_stride,
    load_stop,
    num_org,
    PADDING: tl.constexpr,
    ROWS: tl.constexpr,
    PREFIX: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of ids of one request, all rows.

    Args:
        local: ``[ROWS, B, N]`` logits, of which the first ``load_stop`` columns may be read.
        scores: ``[B, chunks * BLOCK]`` keys of the best corrected row, int16 or int32.
        group_best: ``[B, chunks * BLOCK / GROUP]``, the same type.
        row_best, row_best_at: ``[B, PREFIX, chunks]`` int32, key and position.
        nan_masks: ``[B, chunks]`` int64, bit ``t`` for a NaN in row ``t``.
    """
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    request = tl.program_id(1).to(tl.int64)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = at < load_stop
    real = at < num_org
    base = local + request * request_stride + at
    stride = tl.full([], 1, tl.int64) * row_stride
    nan = at < 0

    if PREFIX < ROWS:
        best = tl.full([BLOCK], -float("inf"), tl.float32)
        for t in tl.static_range(PREFIX, ROWS):
            x = tl.load(base + t * stride, mask=inside, other=-float("inf"))
            # A NaN sticks, which costs nothing and tells whether the slower look below is needed.
            best = tl.maximum(best, x.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
        nan = best != best
    for t in tl.static_range(PREFIX):
        x = tl.load(base + t * stride, mask=inside, other=-float("inf"))
        x = x.to(tl.float32)
        nan = nan | (x != x)
        key = tl.where(real, _keys(x, local.dtype.element_ty, PADDING), PADDING)
        top = tl.max(key, 0)
        slot = (request * PREFIX + t) * chunks + chunk
        tl.store(row_best + slot, top)
        tl.store(row_best_at + slot, tl.min(tl.where(key == top, at, 2147483647), 0))

    nan_mask = tl.full([], 0, tl.int64)
    if tl.max((nan & real).to(tl.int32), 0) > 0:
        if PREFIX < ROWS:
            best = tl.full([BLOCK], float("nan"), tl.float32)
        for row in range(ROWS):
            # Another name than above: what a loop carries must keep its type.
            value = tl.load(base + row * stride, mask=inside, other=-float("inf")).to(tl.float32)
            found = tl.max(((value != value) & real).to(tl.int32), 0)
            nan_mask = nan_mask | (found.to(tl.int64) << row)
            if PREFIX < ROWS:
                better = tl.maximum(best, value, propagate_nan=tl.PropagateNan.NONE)
                best = tl.where(row >= PREFIX, better, best)
    tl.store(nan_masks + request * chunks + chunk, nan_mask)

    if PREFIX < ROWS:
        key = tl.where(real, _keys(best, local.dtype.element_ty, PADDING), PADDING)
        tl.store(scores + request * chunks * BLOCK + at, key)
        GROUPS: tl.constexpr = BLOCK // GROUP
        top = tl.max(tl.reshape(key, [GROUPS, GROUP]), 1)
        slot = chunk * GROUPS + tl.arange(0, GROUPS)
        tl.store(group_best + request * chunks * GROUPS + slot, top)


@jit
def finish_request(
    request,
    row_best,
    row_best_at,
    nan_masks,
    prefix_keys,
    prefix_ids,
    nan_rows,
    chunks,
    start,
    PADDING: tl.constexpr,
    ROWS: tl.constexpr,
    PREFIX: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    chunk = tl.arange(0, CHUNKS)
    live = chunk < chunks
    for t in tl.static_range(PREFIX):
        slot = (request * PREFIX + t) * chunks + chunk
        key = tl.load(row_best + slot, mask=live, other=-2147483648)
        at = tl.load(row_best_at + slot, mask=live, other=2147483647)
        top = tl.max(key, 0)
        best_at = tl.min(tl.where(key == top, at, 2147483647), 0)
        tl.store(prefix_keys + request * PREFIX + t, tl.where(top == PADDING, -2147483648, top))
        tl.store(prefix_ids + request * PREFIX + t, best_at + start)
    masks = tl.load(nan_masks + request * chunks + chunk, mask=live, other=0)
    if tl.max((masks != 0).to(tl.int32), 0) > 0:
        found = tl.full([], 0, tl.int64)
        for row in range(ROWS):
            found += tl.max(((masks >> row) & 1).to(tl.int32), 0).to(tl.int64)
        tl.atomic_add(nan_rows, found)


@jit
def finish_rows(
    row_best,
    row_best_at,
    nan_masks,
    prefix_keys,
    prefix_ids,
    nan_rows,
    chunks,
    start,
    PADDING: tl.constexpr,
    ROWS: tl.constexpr,
    PREFIX: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The best of all chunks' bests for every prefix row of a request, and its rows with NaN."""
    finish_request(
        tl.program_id(0).to(tl.int64),
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
