"""Kernels that draw a token at every row of logits by the Gumbel-max trick.

Logits are read twice: for the row's peak, and for the draw. Noise is made where it is used.
"""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from knockon.engine.fused.gumbel import exponent, log_exponential, row_key
from knockon.layers.fused.pdl import follow
from knockon.triton_backend import jit, tl


# One compiled kernel serves every batch and verify width.
@jit(do_not_specialize=["tiles"])
def peaks_of_chunks(
    logits,
    peaks,
    row_stride,
    width,
    tiles,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The largest logit of one chunk of one row, ``-inf`` where there is none.

    Args:
        logits: ``[rows, width]``.
        peaks: ``[rows, chunks]`` FP32.
        tiles: of one chunk.
    """
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    lane = tl.arange(0, TILE)
    source = logits + row * row_stride
    best = tl.full([TILE], -float("inf"), tl.float32)
    for tile in range(tiles):
        here = (chunk * tiles + tile) * TILE + lane
        x = tl.load(source + here, mask=here < width, other=-float("inf")).to(tl.float32)
        best = tl.where(x > best, x, best)  # NaN never wins
    tl.store(peaks + row * tl.num_programs(1) + chunk, tl.max(best, 0))


@jit
def row_shift(peaks, row, chunks, CHUNKS: tl.constexpr):
    """What is taken off a row's logits: its peak, 0 where that is not finite."""
    chunk = tl.arange(0, CHUNKS)
    of_row = tl.load(peaks + row * chunks + chunk, mask=chunk < chunks, other=-float("inf"))
    peak = tl.max(of_row, 0)
    return tl.where(tl.abs(peak) < float("inf"), peak, 0.0)


@jit
def tempered(x, shift, temperature):
    """``(x - shift) / temperature`` rounded as PyTorch does; NaN is ``-inf``, 0 divides by 1."""
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    x = tl.where(x == x, x.to(tl.float32), -float("inf"))
    return tl.div_rn(x - shift, tl.zeros_like(x) + divisor)


@jit(
    do_not_specialize=[
        *("rows_of_request", "tiles", "seed_stride", "temperature_stride", "min_p_stride"),
    ]
)
def draw_from_chunks(
    logits,
    peaks,
    seeds,
    positions,
    temperatures,
    log_min_ps,
    least_logits,
    least_weights,
    best,
    row_stride,
    width,
    rows_of_request,
    tiles,
    seed_stride,
    temperature_stride,
    min_p_stride,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    DEVICE: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best of one chunk of one row: its score's key above, 2^31 - 1 less its id below.

    Args:
        logits: ``[rows, width]``; ``rows_of_request`` rows after one another are one request's.
        peaks: ``[rows, chunks]`` FP32.
        seeds, temperatures, log_min_ps: of the requests.
        positions: ``[rows]`` int64.
        least_logits, least_weights: ``[rows]`` FP32, of ``thresholds_of_rows``; read if ``TOP_K``,
            if ``TOP_P``.
        best: ``[rows, chunks]`` int64.
    """
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    request = row // rows_of_request
    temperature = tl.load(temperatures + request * temperature_stride)
    key = row_key(tl.load(seeds + request * seed_stride), tl.load(positions + row))
    shift = row_shift(peaks, row, chunks, CHUNKS)
    lane = tl.arange(0, TILE)
    first = chunk * tiles * TILE
    source = logits + row * row_stride
    value = tl.full([TILE], -float("inf"), tl.float32)
    at = first + lane
    for tile in range(tiles):
        here = first + tile * TILE + lane
        x = tl.load(source + here, mask=here < width, other=-float("inf"))
        x = tempered(x, shift, temperature)
        noise = log_exponential(key, here, DEVICE)
        score = x - tl.where(temperature == 0.0, 0.0, noise)
        if TOP_K:
            score = tl.where(x >= tl.load(least_logits + row), score, -float("inf"))
        if TOP_P:
            likely = exponent(x, DEVICE) >= tl.load(least_weights + row)
            score = tl.where(likely, score, -float("inf"))
        if MIN_P:
            floor = tl.load(log_min_ps + request * min_p_stride)
            score = tl.where(x >= floor, score, -float("inf"))
        better = score > value
        value = tl.where(better, score, value)
        at = tl.where(better, here, at)
    top = tl.max(value, 0)
    where = tl.min(tl.where(value == top, at, 2147483647), 0)
    number = tl.where(top == 0.0, 0.0, top)  # one zero
    bits = number.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    packed = (order.to(tl.int64) << 32) | (2147483647 - where).to(tl.int64)
    tl.store(best + row * chunks + chunk, packed)


@jit(do_not_specialize=["chunks"])
def best_of_chunks(best, drawn, chunks, CHUNKS: tl.constexpr, PDL: tl.constexpr):
    """The id in the best of a row's chunks, the lowest of ties: ``[rows]`` int64."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    lowest = -9223372036854775808
    packed = tl.load(best + row * chunks + chunk, mask=chunk < chunks, other=lowest)
    tl.store(drawn + row, 2147483647 - (tl.max(packed, 0) & 0xFFFFFFFF))
