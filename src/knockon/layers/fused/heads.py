"""What is done to a few heads of one row: norm, rotation, the way to their place."""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from knockon.triton_backend import jit, power_of_two, tl

HEADS = 4  # of one program, which is one warp


def head_sizes(dim: int, rotary_dim: int) -> dict[str, int]:
    """Compile-time sizes of heads of ``dim`` dimensions, the first ``rotary_dim`` rotated."""
    rest = dim - rotary_dim
    return {
        "HEADS": HEADS,
        "DIM": dim,
        "PAIRS": rotary_dim // 2,
        "PAIR_BLOCK": power_of_two(rotary_dim // 2),
        "REST_BLOCK": power_of_two(rest) if rest else 0,
    }


@jit
def turn_heads(
    source,
    target,
    count,
    gain,
    cos,
    sin,
    eps,
    NORM: tl.constexpr,
    GAIN_STEP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """The first ``count`` heads at ``source``, normed and rotated, to ``target``.

    Args:
        source, target: ``[count, DIM]``.
        gain: the norms' weights, ``GAIN_STEP`` elements from one head's to the next.
        cos, sin: the tables' rows of this position.
    """
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIR_BLOCK)[None, :]
    live = (head < count) & (pair < PAIRS)
    at = head * DIM + pair
    low = tl.load(source + at, mask=live, other=0.0).to(tl.float32)
    high = tl.load(source + at + PAIRS, mask=live, other=0.0).to(tl.float32)
    gain_at = head * GAIN_STEP + pair
    if REST_BLOCK > 0:
        dim = 2 * PAIRS + tl.arange(0, REST_BLOCK)[None, :]
        rest_live = (head < count) & (dim < DIM)
        rest = tl.load(source + head * DIM + dim, mask=rest_live, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(low * low + high * high, 1)
        if REST_BLOCK > 0:
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        low = _scaled(low, scale, gain + gain_at, live, source.dtype.element_ty)
        high = _scaled(high, scale, gain + gain_at + PAIRS, live, source.dtype.element_ty)
        if REST_BLOCK > 0:
            rest_gain = gain + head * GAIN_STEP + dim
            rest = _scaled(rest, scale, rest_gain, rest_live, source.dtype.element_ty)
    c = tl.load(cos + pair, mask=pair < PAIRS, other=0.0)
    s = tl.load(sin + PAIRS + pair, mask=pair < PAIRS, other=0.0)  # the half without the sign
    tl.store(target + at, (low * c - high * s).to(target.dtype.element_ty), mask=live)
    tl.store(target + at + PAIRS, (high * c + low * s).to(target.dtype.element_ty), mask=live)
    if REST_BLOCK > 0:
        tl.store(target + head * DIM + dim, rest.to(target.dtype.element_ty), mask=rest_live)


@jit
def _scaled(x, scale, gain, live, kind: tl.constexpr):
    """Normed heads, rounded before and after the weight as the models' authors round.

    Those whose weights are kept wider than heads round once, after it.
    """
    normed = x * scale
    if gain.dtype.element_ty == kind:
        normed = normed.to(kind).to(tl.float32)
    weight = tl.load(gain, mask=live, other=0.0).to(tl.float32)
    return (normed * weight).to(kind).to(tl.float32)


@jit
def copy_heads(source, target, count, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """The first ``count`` heads at ``source`` to ``target``, in its type."""
    at = tl.arange(0, BLOCK)
    live = at < count * DIM
    moved = tl.load(source + at, mask=live, other=0.0)
    tl.store(target + at, moved.to(target.dtype.element_ty), mask=live)
