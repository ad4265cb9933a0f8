"""Logits as integers whose plain order is the order of logits.

16-bit logits have 16-bit keys, FP32 logits 32-bit ones. A bigger key is a better logit, equal keys
are equal logits (one zero), NaN is below ``-inf`` and padding below NaN::

    bits = the bit pattern of x + 0.0, as a signed integer
    key  = bits ^ ((bits >> (n - 1)) & INT_MAX);    NaN: INT_MIN + 1;    padding: INT_MIN
"""

from __future__ import annotations

import torch
from torch import Tensor

from knockon.errors import Refused

_KEY_DTYPE = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
}
# What a pool's entry past the shard's own ids carries, whatever the logits' dtype.
SENTINEL = torch.iinfo(torch.int32).min


def key_dtype(logits: torch.dtype) -> torch.dtype:
    """The integers that logits of this dtype map to.

    Raises:
        Refused: a dtype without keys of at most 32 bits.
    """
    if logits not in _KEY_DTYPE:
        raise Refused("logits dtype", logits, "bfloat16, float16 or float32")
    return _KEY_DTYPE[logits]


def padding_key(logits: torch.dtype) -> int:
    """The key of padding, below those of all logits of this dtype."""
    return torch.iinfo(key_dtype(logits)).min


def keys_of(logits: Tensor) -> Tensor:
    """Keys of ``logits``, int32 of the same shape (those of 16-bit logits sign-extended)."""
    integer = key_dtype(logits.dtype)
    info = torch.iinfo(integer)
    bits = (logits + 0.0).view(integer)  # adding +0.0 turns -0.0 into +0.0
    key = bits ^ ((bits >> (info.bits - 1)) & info.max)
    return key.masked_fill_(logits.isnan(), info.min + 1).to(torch.int32)
