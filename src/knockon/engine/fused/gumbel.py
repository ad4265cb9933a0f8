"""The noise of :mod:`knockon.engine.noise` inside a kernel, bit for bit."""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from knockon.triton_backend import jit, tl


@jit
def finalise(words):
    """SplitMix64's finaliser, of unsigned 64-bit words: see ``noise._finalise``."""
    words = words ^ (words >> 30)
    words = words * 0xBF58476D1CE4E5B9
    words = words ^ (words >> 27)
    words = words * 0x94D049BB133111EB
    return words ^ (words >> 31)


@jit
def row_key(seed, position):
    """The key of a row's noise, from int64 scalars: see ``noise.row_keys``."""
    start = finalise(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    return finalise(start + position.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15)


@jit
def log_exponential(key, ids, DEVICE: tl.constexpr):
    """The logarithm of each id's unit exponential, FP32: ``noise.exponential(…).log()``.

    Args:
        key: of the row, uint64.
        ids: int32.
        DEVICE: call the device's own ``log1p`` and ``log``, which are PyTorch's too; Triton's
            interpreter has neither.
    """
    steps = (ids + 1).to(tl.int64).to(tl.uint64, bitcast=True)
    words = finalise(key + steps * 0x9E3779B97F4A7C15)
    fraction = ((words >> 11) | 1).to(tl.float32)
    # 2^-53, and 1 - 2^-24: the largest float below 1.
    uniform = tl.minimum(fraction * 1.1102230246251565e-16, 0.999999940395355224609375)
    if DEVICE:
        return tl.extra.cuda.libdevice.log(-tl.extra.cuda.libdevice.log1p(-uniform))
    # A multiple of 2^-53, so the difference is exact.
    exponential = -tl.log(1.0 - uniform.to(tl.float64))
    return tl.log(exponential.to(tl.float32))


@jit
def exponent(x, DEVICE: tl.constexpr):
    """``exp(x)`` as PyTorch rounds it."""
    if DEVICE:
        return tl.extra.cuda.libdevice.exp(x)
    return tl.exp(x)
