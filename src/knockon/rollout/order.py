"""The order of logits, made plain for the device's own comparisons.

By value; ``-0.0`` equals ``+0.0``; ``-inf`` loses to every finite id; NaN loses to every number;
padding loses to NaN; exact ties go to the lowest id. ``torch.max`` and ``torch.topk`` rank NaN
first, and ``topk`` breaks ties as it likes, so logits are first mapped to *ranks*.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from knockon.rollout.fused.argmax import argmax_kernel, argmax_runs_on

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
# The rank of padding among the ranks of ``small_ranks``, which take 16 bits with their sign.
_SMALL_PADDING = -(1 << 15)
# Rows of so many logits in all are searched by groups, reading them once in their own dtype.
_LARGE = 1 << 22
_GROUP = 16


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
    if dtype.is_floating_point:
        return -float("inf")
    return _SMALL_PADDING if dtype == torch.int32 else _INT64_MIN


def small_ranks(logits: Tensor) -> Tensor:
    """Ranks that are cheap to make unique: as :func:`ranks`, but FP16 and BF16 map to int32.

    A 16-bit logit has 65,536 values, so its rank is a look-up in a table of them, from -32767 to
    32767, which leaves an integer's other bits to a position. For few logits: a look-up an element.
    """
    if logits.element_size() != 2:
        return ranks(logits)
    table = rank_table(logits.dtype, logits.device)
    return table[logits.view(torch.int16).to(torch.int64)]  # negative patterns count from the end


@lru_cache(maxsize=16)
def rank_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[65536]`` int32: the rank of each bit pattern of a 16-bit ``dtype``, equals sharing one.

    Made once per device; a rollout makes it at construction, so that no graph captures it.
    """
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    _, dense = ranks(patterns).unique(return_inverse=True)
    return (dense - (1 << 15) + 1).to(torch.int32).to(device)


def highest(logits: Tensor, dim: int) -> Tensor:
    """The best logit along ``dim``, NaN only where all are: in the logits' dtype, ``dim`` removed.

    By halves: few passes whatever the dtype, and no widened copy. An odd half takes the middle
    twice, which changes no maximum.
    """
    n = logits.shape[dim]
    while n > 1:
        half = (n + 1) // 2
        logits = torch.fmax(logits.narrow(dim, 0, half), logits.narrow(dim, n - half, half))
        n = half
    return logits.squeeze(dim)


def highest_of_rows(rows: Tensor) -> Tensor:
    """:func:`highest` along the first dimension by ranks, for a CPU, whose ``fmax`` is slow.

    ``rows [T, B, N]`` of a dtype that has a wider one.
    """
    best = ranks(rows[0])
    for row in rows[1:]:
        torch.maximum(best, ranks(row), out=best)
    return best.to(rows.dtype).masked_fill_(best == _BELOW[best.dtype][1], float("nan"))


def argmax(logits: Tensor) -> Tensor:
    """The best position along the last dimension, the lowest of ties: ``[..., N] -> [...]``."""
    if argmax_runs_on(logits):
        return argmax_kernel(logits)
    if logits.is_cuda and logits.numel() >= _LARGE and logits.shape[-1] % _GROUP == 0:
        return _argmax_by_groups(logits)
    return ranks(logits).argmax(-1)


def _argmax_by_groups(logits: Tensor) -> Tensor:
    """The same, read once in its own dtype: the first best group holds the first best logit."""
    n = logits.shape[-1]
    groups = logits.unflatten(-1, (n // _GROUP, _GROUP))
    group = ranks(highest(groups, -1)).argmax(-1, keepdim=True)
    members = groups.gather(-2, group.unsqueeze(-1).expand(*group.shape, _GROUP)).squeeze(-2)
    return group.squeeze(-1) * _GROUP + ranks(members).argmax(-1)


def best_positions(ranked: Tensor, k: int) -> Tensor:
    """Positions of the ``k`` best of ``ranked [B, N]``, ascending: ``[B, k]`` int64.

    Exact at the cutoff: among equal ranks the lowest positions are taken.

    Args:
        ranked: ranks of :func:`ranks` or :func:`small_ranks`.
    """
    n = ranked.shape[-1]
    if ranked.dtype == torch.int32:
        # Rank above, position below: in 32 bits where positions fit in 16, for ``topk`` and
        # ``sort`` pass over the keys once for every few bits.
        narrow = n <= 1 << 16
        dtype, shift = (torch.int32, 16) if narrow else (torch.int64, 32)
        descending = torch.arange(n - 1, -1, -1, dtype=dtype, device=ranked.device)
        unique = torch.add(descending, ranked, alpha=1 << shift)
    elif ranked.dtype.is_floating_point:
        # Float ranks hold at most FP32's precision, so value and position fit one int64.
        bits = (ranked.double() + 0.0).view(torch.int64)
        bits = bits ^ ((bits >> 63) & _INT64_MAX)
        position = torch.arange(_POSITION_MASK, _POSITION_MASK - n, -1, device=ranked.device)
        unique = (bits & ~_POSITION_MASK) | position
    else:
        return best_positions_by_sorting(ranked, k)
    chosen = unique.topk(k, dim=-1, sorted=False).indices
    short = torch.int16 if n <= 1 << 15 else torch.int32
    return chosen.to(short).sort(dim=-1).values.to(torch.int64)


def best_positions_by_sorting(ranked: Tensor, k: int) -> Tensor:
    best_first = ranked.sort(dim=-1, descending=True, stable=True).indices
    return best_first[..., :k].sort(dim=-1).values


def rows_with_nan(logits: Tensor) -> Tensor:
    """How many rows of ``logits [..., N]`` hold a NaN, an int64 scalar on the device."""
    return logits.amax(-1).isnan().sum()
