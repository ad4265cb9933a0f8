"""Kernels of paged attention: store a block's rows, attend from them, sum the parts of a context.

Every length is read on the device: a captured launch serves contexts of any length.
"""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from knockon.layers.fused.pdl import follow
from knockon.triton_backend import jit, tl


@jit
def store_rows(
    k,
    v,
    k_pages,
    v_pages,
    slots,
    rows,
    k_request_stride,
    k_row_stride,
    k_head_stride,
    v_request_stride,
    v_row_stride,
    v_head_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row's keys and values, all heads, to its slot.

    Args:
        k, v: ``[B, rows, KV_HEADS, HEAD_DIM]``, elements of a head contiguous.
        k_pages, v_pages: ``[num_slots, KV_HEADS, HEAD_DIM]``.
        slots: ``[B * rows]`` int64.
    """
    follow(PDL)
    row = tl.program_id(0)
    request = (row // rows).to(tl.int64)
    t = (row % rows).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < KV_HEADS) & (d < HEAD_DIM)
    k_at = k + request * k_request_stride + t * k_row_stride + head * k_head_stride + d
    v_at = v + request * v_request_stride + t * v_row_stride + head * v_head_stride + d
    to = tl.load(slots + row) * (KV_HEADS * HEAD_DIM) + head * HEAD_DIM + d
    key = tl.load(k_at, mask=inside, other=0.0)
    value = tl.load(v_at, mask=inside, other=0.0)
    tl.store(k_pages + to, key.to(k_pages.dtype.element_ty), mask=inside)
    tl.store(v_pages + to, value.to(v_pages.dtype.element_ty), mask=inside)


@jit
def attend_pages(
    q,
    k_pages,
    v_pages,
    positions,
    page_table,
    out,
    weights,
    scale,
    rows,
    kv_heads,
    capacity,
    q_request_stride,
    q_row_stride,
    q_head_stride,
    positions_stride,
    table_stride,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    FIRST: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    NEAR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BLOCK_M`` rows of one request and KV head over one part of its context.

    A row is a query head of a position: the ``GROUP`` heads that share a KV head lie side by side,
    so keys are read once for all. Programs ``(request and KV head and tile of rows, part)``.

    Blocks of keys are dealt to the parts in turn, by their place in the context: a row's blocks,
    and the order in which it adds them up, depend neither on the other rows of its tile nor on how
    much further they see. To a block that it does not see at all a row adds exactly nothing.

    Args:
        q: ``[B, rows, kv_heads * GROUP, HEAD_DIM]``, elements of a head contiguous.
        k_pages, v_pages: ``[num_slots, kv_heads, HEAD_DIM]``.
        positions: ``[B, rows]`` int64.
        page_table: ``[B, P]`` integers.
        out: ``[B, rows, kv_heads * GROUP, parts, HEAD_DIM]``; FP32 if there are several parts.
        weights: ``[B, rows, kv_heads * GROUP, parts]`` FP32, log2 of each part's sum of
            exponentials, written if there are several.
        scale: of the scores, times log2(e).
        capacity: positions that the page table has room for.
        WINDOW: 0 for none.
        FIRST: keys before it are seen by their own rows alone.
        NEAR: tiles that read the same keys run side by side; else those that see the most first.
    """
    follow(PDL)
    tiles = tl.cdiv(rows * GROUP, BLOCK_M)
    pairs = tl.num_programs(0) // tiles
    if NEAR:
        pair = tl.program_id(0) // tiles
        tile = tl.program_id(0) % tiles
    else:
        pair = tl.program_id(0) % pairs
        tile = tiles - 1 - tl.program_id(0) // pairs
    kv_head = pair % kv_heads
    request = (pair // kv_heads).to(tl.int64)
    part = tl.program_id(1)
    parts = tl.num_programs(1)

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    # Rows past the end repeat the last position, so that whatever is loaded is finite.
    t = tl.minimum(m // GROUP, rows - 1)
    head = kv_head * GROUP + m % GROUP
    d = tl.arange(0, BLOCK_D)
    row_positions = positions + request * positions_stride
    position = tl.load(row_positions + t).to(tl.int32)
    seen_to = position
    if not CAUSAL:
        last_position = tl.load(row_positions + rows - 1).to(tl.int32)
        seen_to = tl.maximum(tl.max(position, 0), last_position) + tl.zeros_like(position)
    q_at = q + request * q_request_stride + t.to(tl.int64) * q_row_stride + head * q_head_stride
    if HEAD_DIM == BLOCK_D:
        query = tl.load(q_at[:, None] + d[None, :])
    else:
        query = tl.load(q_at[:, None] + d[None, :], mask=(d < HEAD_DIM)[None, :], other=0.0)

    end = tl.minimum(tl.max(seen_to, 0) + 1, capacity)
    first = part
    if WINDOW > 0:
        begin = tl.maximum(tl.min(position, 0) - (WINDOW - 1), 0) // BLOCK_N
        first = begin + (part + parts - begin % parts) % parts
    first = first * BLOCK_N
    stride = parts * BLOCK_N

    # A floor instead of -inf: the difference of two of them is a number.
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    slot_stride = kv_heads * HEAD_DIM
    k_head = k_pages + kv_head * HEAD_DIM
    v_head = v_pages + kv_head * HEAD_DIM
    table = page_table + request * table_stride
    # Keys past the end are masked below; what is loaded for them is the last that counts.
    key = tl.minimum(first + tl.arange(0, BLOCK_N), end - 1)
    slot = tl.load(table + key // PAGE_SIZE).to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
    # Blocks that end up to here are seen whole by every row.
    all_see_to = tl.minimum(tl.min(seen_to, 0) + 1, end)
    for n0 in range(first, end, stride):
        at = (slot * slot_stride)[:, None] + d[None, :]
        if HEAD_DIM == BLOCK_D:
            keys = tl.load(k_head + at)
            values = tl.load(v_head + at)
        else:
            inside = (d < HEAD_DIM)[None, :]
            keys = tl.load(k_head + at, mask=inside, other=0.0)
            values = tl.load(v_head + at, mask=inside, other=0.0)
        keys, values = keys.to(query.dtype), values.to(query.dtype)  # from FP8, if they are
        # The next block's slots a turn ahead: else the pipeline would spend a stage on them.
        key = tl.minimum(n0 + stride + tl.arange(0, BLOCK_N), end - 1)
        slot = tl.load(table + key // PAGE_SIZE).to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
        score = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        whole = n0 + BLOCK_N <= all_see_to
        if WINDOW > 0:
            whole = whole & (n0 > tl.max(position, 0) - WINDOW)
        if FIRST > 0:
            whole = whole & (n0 >= FIRST)
        if not whole:
            n = n0 + tl.arange(0, BLOCK_N)
            seen = (n[None, :] <= seen_to[:, None]) & (n < end)[None, :]
            if WINDOW > 0:
                seen = seen & (n[None, :] > position[:, None] - WINDOW)
            if FIRST > 0:
                seen = seen & (n[None, :] >= tl.minimum(position, FIRST)[:, None])
            score = tl.where(seen, score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1) * scale)
        probability = tl.exp2(score * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(probability, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(probability.to(values.dtype), values, acc, input_precision=PRECISION)
        top = new_top

    total_or_one = tl.where(total > 0.0, total, 1.0)
    acc = acc * (1.0 / total_or_one)[:, None]
    real = m < rows * GROUP
    heads = kv_heads * GROUP
    place = ((request * rows + t) * heads + head) * parts + part
    store_mask = real[:, None] & (d < HEAD_DIM)[None, :]
    out_at = out + place[:, None] * HEAD_DIM + d[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=store_mask)
    if SPLIT:
        tl.store(weights + place, top + tl.log2(total_or_one), mask=real)


@jit
def sum_parts(
    partial,
    weights,
    out,
    parts,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """The mean of a row's parts, each weighed by its sum of exponentials.

    Programs ``(row, BLOCK_D elements of a head)``. A part that saw no key weighs nothing.

    Args:
        partial, weights: as ``attend_pages`` left them.
        out: ``[B, rows, heads, HEAD_DIM]``.
    """
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    part = tl.arange(0, BLOCK_P)
    live = part < parts
    inside = d < HEAD_DIM
    weight = tl.load(weights + row * parts + part, mask=live, other=-float("inf"))
    at = partial + (row * parts + part)[:, None] * HEAD_DIM + d[None, :]
    values = tl.load(at, mask=live[:, None] & inside[None, :], other=0.0)
    weight = tl.exp2(weight - tl.max(weight, 0))
    mean = tl.sum(values * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + row * HEAD_DIM + d, mean.to(out.dtype.element_ty), mask=inside)
