"""Gumbel noise that is a pure function of (request seed, absolute position, vocabulary id).

Nothing is carried from draw to draw, so a token's noise does not depend on the batch it is drawn
in, on the verify width, on the device or on the rank: this is what makes a seeded speculative run
equal the seeded target-only run token for token.
"""

from __future__ import annotations

import secrets

from torch import Tensor, arange, int64

# SplitMix64 (Steele, Lea and Flood 2014): its Weyl increment and finaliser, as signed 64-bit words.
_WEYL = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLY_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLY_2 = 0x94D049BB133111EB - (1 << 64)


def fresh_seed() -> int:
    """A seed from the operating system, for a request that names none: any int64."""
    return secrets.randbits(64) - (1 << 63)


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """The key of each row's noise.

    Args:
        seeds: int64, broadcastable against ``positions``.
        positions: int64, the absolute position at which the drawn token will stand.

    Returns:
        int64 of the broadcast shape. Seed and position are each put through the finaliser, so
        that neighbouring seeds and neighbouring positions have unrelated keys.
    """
    return _finalise(_finalise(seeds + _WEYL) + positions * _WEYL)


def position_words(seeds: Tensor, positions: Tensor) -> Tensor:
    """64 uniform bits for each position: that word of the SplitMix64 sequence started at the seed.

    Args:
        seeds: int64, broadcastable against ``positions``; best spread over all of 64 bits.
        positions: int64.

    Returns:
        int64 of the broadcast shape.
    """
    return _finalise(seeds + positions * _WEYL)


def hash_words(keys: Tensor, vocab_size: int) -> Tensor:
    """int64 ``[N, V]``: 64 uniform bits for each key of ``[N]`` and each vocabulary id.

    Row ``n`` is the SplitMix64 sequence started at ``keys[n]``. Two rows would share a stretch
    only if their keys lay within ``V`` increments of each other: odds of ``2V / 2^64`` a pair.
    Integer operations that wrap, so the bits are the same on every device.
    """
    ids = arange(1, vocab_size + 1, dtype=int64, device=keys.device).mul_(_WEYL)
    return _finalise(keys[:, None] + ids)


def exponential(keys: Tensor, vocab_size: int) -> Tensor:
    """float32 ``[N, V]``: unit exponentials ``E``; ``-log E`` is Gumbel noise.

    A token of probability ``p`` wins by an ``E`` of the order of ``p``, so what must be fine is
    the grid near ``E = 0``. ``u`` is 53 bits of the hash as a float32, which near 0 keeps all of
    their 2^-53 steps, and ``E = -log1p(-u)`` keeps ``u``'s relative precision there: a token of
    probability 1e-12 is drawn with the right odds to 1e-4 of itself. Made the usual way,
    ``-log(u)`` of a 24-bit ``u`` has steps of 6e-8, which in a vocabulary of 250,000 tokens would
    never draw most of the tail. The coarse end, ``u`` near 1, only orders tokens that lose.
    ``u`` is kept inside (0, 1), so that ``E`` is finite and above 0.
    """
    words = hash_words(keys, vocab_size)
    words.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1).bitwise_or_(1)
    uniform = words.float().mul_(2.0**-53).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def _finalise(words: Tensor) -> Tensor:
    """SplitMix64's finaliser, a bijection of 64-bit words, in place."""
    for shift, multiplier in ((30, _MULTIPLY_1), (27, _MULTIPLY_2), (31, 1)):
        # int64 shifts copy the sign down; the mask makes this one logical.
        shifted = (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        words.bitwise_xor_(shifted)
        if multiplier != 1:
            words.mul_(multiplier)
    return words
