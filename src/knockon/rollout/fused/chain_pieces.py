"""What both chain kernels compute alike: the GRU cell, SiLU, and sums packed for an argmax."""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from knockon.triton_backend import jit, tl

ID_BITS = 24  # an id's room in a packed sum
MAX_VOCAB = 1 << ID_BITS


@jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@jit
def tanh(x):
    """Saturates to exactly 1 and -1, and is exact at 0."""
    t = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - t) / (1.0 + t)
    far = tl.where(x < 0, -far, far)
    # Near 0 the difference cancels; there the Taylor series is good to 1e-8 of x.
    y = x * x
    near = x * (1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, near, far)


@jit
def gru_cell(state, in_reset, in_update, in_new, st_reset, st_update, st_new):
    """``torch.nn.GRUCell`` without bias, from the input's gates and the state's."""
    reset = sigmoid(in_reset + st_reset)
    update = sigmoid(in_update + st_update)
    new = tanh(in_new + reset * st_new)
    return new + update * (state - new)


@jit
def silu(x):
    return x * sigmoid(x)


@jit
def pack(total, ids):
    """FP32 sums and their ids as int64 whose maximum is the argmax: the lowest id of ties.

    Never negative, so that 0 stands for "nothing yet": 32 bits of order-preserving key above the
    inverted id. Signed zeros are one; NaN ranks below every number.
    """
    total = tl.where(total == 0.0, 0.0, total)
    bits = total.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(total != total, -0x7FFFFFFF, key)
    return ((key.to(tl.int64) + 0x80000000) << 24) | (0xFFFFFF - ids.to(tl.int64))


@jit
def unpack_id(packed):
    return 0xFFFFFF - (packed & 0xFFFFFF)


@jit
def pool_sums(rows, even, odd, PACKED: tl.constexpr):
    """``rows · activations`` in FP32, ``[N]``.

    PACKED rows hold two BF16 weights in an int32, the even column in its low half: half the
    registers while they wait. Otherwise ``even`` holds all activations and ``odd`` is not used.
    """
    if PACKED:
        low = (rows << 16).to(tl.float32, bitcast=True)
        high = (rows & -65536).to(tl.float32, bitcast=True)
        return tl.sum(low * even[None, :] + high * odd[None, :], 1)
    return tl.sum(rows.to(tl.float32) * even[None, :], 1)
