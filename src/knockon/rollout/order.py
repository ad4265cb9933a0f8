"""The order of logits, made plain for the device's own comparisons.

By value; ``-0.0`` equals ``+0.0``; ``-inf`` loses to every finite id; NaN loses to every number;
padding loses to NaN; exact ties go to the lowest id. ``torch.max`` and ``torch.topk`` rank NaN
first, and ``topk`` breaks ties as it likes, so logits are first mapped to *ranks*.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A wider float has room below the narrow one's finite values for what must lose to them:
# dtype of ranks -> (rank of -inf, rank of NaN); padding is -inf itself.
_BELOW = {
    torch.float32: (-3.4e38, torch.finfo(torch.float32).min),
    torch.float64: (-1e300, -1e301),
}
_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
}
_INT64_MIN = torch.iinfo(torch.int64).min
_INT64_MAX = torch.iinfo(torch.int64).max
# An FP32 value in FP64 leaves the 29 lowest mantissa bits free: room for a position.
_POSITION_BITS = 29
_POSITION_MASK = (1 << _POSITION_BITS) - 1


def ranks(logits: Tensor) -> Tensor:
    """A fresh tensor of the same shape whose plain ``<`` and ``==`` are the order of logits.

    FP16 and BF16 map to FP32, FP32 to FP64, and FP64, which has no wider type, to int64.
    """
    if logits.dtype == torch.float64:
        bits = (logits + 0.0).view(torch.int64)  # adding +0.0 turns -0.0 into +0.0
        ordered = torch.where(bits < 0, bits ^ _INT64_MAX, bits)
        return ordered.masked_fill_(logits.isnan(), _INT64_MIN + 1)
    wide = _WIDER[logits.dtype]
    neg_inf, nan = _BELOW[wide]
    return logits.to(wide).nan_to_num_(nan=nan, posinf=float("inf"), neginf=neg_inf)


def rank_dtype(logits_dtype: torch.dtype) -> torch.dtype:
    """The dtype that :func:`ranks` maps logits of ``logits_dtype`` to."""
    return _WIDER.get(logits_dtype, torch.int64)


def padding_rank(dtype: torch.dtype) -> float | int:
    """The rank of padding, below all others, in ranks of ``dtype``."""
    return -float("inf") if dtype.is_floating_point else _INT64_MIN


def argmax(logits: Tensor) -> Tensor:
    """The best position along the last dimension, the lowest of ties: ``[..., N] -> [...]``."""
    return ranks(logits).argmax(-1)


def best_positions(ranked: Tensor, k: int) -> Tensor:
    """Positions of the ``k`` best of ``ranked [B, N]``, ascending: ``[B, k]`` int64.

    Exact at the cutoff: among equal ranks the lowest positions are taken.
    """
    if not ranked.dtype.is_floating_point:
        return _best_positions_by_sorting(ranked, k)
    # Float ranks hold at most FP32's precision, so value and position fit one int64 without ties.
    bits = (ranked.double() + 0.0).view(torch.int64)
    bits = bits ^ ((bits >> 63) & _INT64_MAX)
    n = ranked.shape[-1]
    position = torch.arange(_POSITION_MASK, _POSITION_MASK - n, -1, device=ranked.device)
    unique = (bits & ~_POSITION_MASK) | position
    return unique.topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values


def _best_positions_by_sorting(ranked: Tensor, k: int) -> Tensor:
    best_first = ranked.sort(dim=-1, descending=True, stable=True).indices
    return best_first[..., :k].sort(dim=-1).values


def rows_with_nan(logits: Tensor) -> Tensor:
    """How many rows of ``logits [..., N]`` hold a NaN, an int64 scalar on the device."""
    return logits.amax(-1).isnan().sum()
