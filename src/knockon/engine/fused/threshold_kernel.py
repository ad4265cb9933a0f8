"""What top-k and top-p keep of each row, by bisection over floats: ``engine/filters.py`` fused.

A pass over a row tries three thresholds at once, so it halves the candidates twice.
"""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from knockon.engine.fused.draw_kernels import row_shift, tempered
from knockon.engine.fused.gumbel import exponent
from knockon.layers.fused.pdl import follow
from knockon.triton_backend import jit, tl


@jit(
    do_not_specialize=[
        *("rows_of_request", "chunks", "tiles"),
        *("temperature_stride", "top_k_stride", "top_p_stride"),
    ]
)
def thresholds_of_rows(
    logits,
    peaks,
    temperatures,
    top_ks,
    top_ps,
    scratch,
    least_logits,
    least_weights,
    row_stride,
    width,
    rows_of_request,
    chunks,
    temperature_stride,
    top_k_stride,
    top_p_stride,
    tiles,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    DEVICE: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row. Its sums are taken in an order that depends on nothing but its width.

    Args:
        logits, peaks, temperatures: as of ``draw_from_chunks``.
        top_ks: int64, 0 for off; top_ps: FP32, ``inf`` for off; of the requests.
        scratch: ``[rows, tiles * TILE]`` FP32, for the row's tempered logits, then its weights.
        least_logits: ``[rows]`` FP32, the ``top_k``-th largest tempered logit, if ``TOP_K``.
        least_weights: ``[rows]`` FP32, the least weight that top-p keeps, if ``TOP_P``.
    """
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    request = row // rows_of_request
    temperature = tl.load(temperatures + request * temperature_stride)
    shift = row_shift(peaks, row, chunks, CHUNKS)
    lane = tl.arange(0, TILE)
    source = logits + row * row_stride
    held = scratch + row * tiles * TILE + lane
    least = -float("inf")
    if TOP_K:
        for tile in range(tiles):
            here = tile * TILE + lane
            x = tl.load(source + here, mask=here < width, other=-float("inf"))
            tl.store(held + tile * TILE, tempered(x, shift, temperature))
        tl.debug_barrier()
        least = _largest_with(held, tl.load(top_ks + request * top_k_stride), tiles, TILE)
        tl.store(least_logits + row, least)
        tl.debug_barrier()
    if TOP_P:
        fraction = tl.load(top_ps + request * top_p_stride)
        on = fraction < float("inf")
        filtered = tl.where(on, tiles, 0)
        mass = tl.zeros([TILE], tl.float32)
        for tile in range(filtered):
            here = tile * TILE + lane
            x = tl.load(source + here, mask=here < width, other=-float("inf"))
            z = tempered(x, shift, temperature)
            weight = tl.where(z >= least, exponent(z, DEVICE), 0.0)
            mass += weight
            tl.store(held + tile * TILE, weight)
        tl.debug_barrier()
        goal = tl.where(on, fraction, 0.0) * tl.sum(mass, 0)
        least_weight = _smallest_below(held, goal, filtered, TILE)
        tl.store(least_weights + row, least_weight)


@jit
def _largest_with(held, wanted, tiles, TILE: tl.constexpr):
    """The largest float that ``wanted`` of the row's values are not below; 0 wanted: ``-inf``.

    Floats are searched by their keys, which are integers of the same order.
    """
    low = tl.full([], -2139095041, tl.int64)  # of -inf
    high = tl.where(wanted > 0, 2139095040, -2139095041).to(tl.int64)  # of inf
    while low < high:
        half = (high - low) // 2
        quarter = (high - low) // 4
        a = high - half - quarter
        b = high - half
        c = high - quarter
        from_a = tl.zeros([TILE], tl.int32)
        from_b = tl.zeros([TILE], tl.int32)
        from_c = tl.zeros([TILE], tl.int32)
        for tile in range(tiles):
            x = tl.load(held + tile * TILE)
            from_a += (x >= _float_of(a)).to(tl.int32)
            from_b += (x >= _float_of(b)).to(tl.int32)
            from_c += (x >= _float_of(c)).to(tl.int32)
        holds_a = tl.sum(from_a, 0) >= wanted
        holds_b = tl.sum(from_b, 0) >= wanted
        holds_c = tl.sum(from_c, 0) >= wanted
        below = tl.where(holds_b, c, tl.where(holds_a, b, a)) - 1
        low = tl.where(holds_c, c, tl.where(holds_b, b, tl.where(holds_a, a, low)))
        high = tl.where(holds_c, high, below)
    return _float_of(low)


@jit
def _float_of(key):
    narrow = key.to(tl.int32)
    return (narrow ^ ((narrow >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _smallest_below(held, goal, tiles, TILE: tl.constexpr):
    """The smallest float from 0 to 1 above which the row's values sum to less than ``goal``.

    Searched by its bits, which for floats from 0 on have the floats' order. No tiles: 0.
    """
    low = tl.full([], 0, tl.int32)
    high = tl.where(tiles > 0, 0x3F800000, 0).to(tl.int32)
    while low < high:
        half = (high - low) // 2
        quarter = (high - low) // 4
        a = low + quarter
        b = low + half
        c = low + half + quarter
        above_a = tl.zeros([TILE], tl.float32)
        above_b = tl.zeros([TILE], tl.float32)
        above_c = tl.zeros([TILE], tl.float32)
        for tile in range(tiles):
            x = tl.load(held + tile * TILE)
            above_a += tl.where(x > a.to(tl.float32, bitcast=True), x, 0.0)
            above_b += tl.where(x > b.to(tl.float32, bitcast=True), x, 0.0)
            above_c += tl.where(x > c.to(tl.float32, bitcast=True), x, 0.0)
        holds_a = tl.sum(above_a, 0) < goal
        holds_b = tl.sum(above_b, 0) < goal
        holds_c = tl.sum(above_c, 0) < goal
        above = tl.where(holds_b, a, tl.where(holds_c, b, c)) + 1
        high = tl.where(holds_a, a, tl.where(holds_b, b, tl.where(holds_c, c, high)))
        low = tl.where(holds_a, low, above)
    return low.to(tl.float32, bitcast=True)
