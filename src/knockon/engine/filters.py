"""Top-k, top-p and min-p as thresholds on the logits, without a sort.

Each filter keeps the tokens at or above a value, so equal logits stay or go together (as in vLLM
and Hugging Face's top-k) and the result does not depend on how a sort breaks ties. Top-p's
threshold is found by bisection over sums: a sort and running sum of the vocabulary costs more on a
CPU, and CUDA's running sum is not reproducible from run to run, which would let two ranks differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The bits of 1.0 as float32. The bits of non-negative floats order as the floats do.
_ONE = 0x3F800000


def top_k_threshold(logits: Tensor, top_k: Tensor, max_top_k: int) -> Tensor:
    """The ``top_k``-th largest logit of each row.

    Args:
        logits: float ``[N, V]``.
        top_k: int64 ``[N]``; 0 keeps the whole row.
        max_top_k: their maximum, known to the host.

    Returns:
        ``[N, 1]``, ``-inf`` where the row is kept whole.
    """
    best = logits.topk(min(max_top_k, logits.shape[-1]), dim=-1).values
    last = best.gather(1, (top_k.clamp(1, best.shape[1]) - 1)[:, None])
    return last.masked_fill((top_k == 0)[:, None], -torch.inf)


def top_p_threshold(weights: Tensor, top_p: Tensor, total: Tensor) -> Tensor:
    """The smallest weight that top-p keeps: a token stays if the mass strictly above it is < p.

    Args:
        weights: float32 ``[N, C]`` in [0, 1], unnormalised probabilities whose row maximum is 1.
        top_p: float32 ``[N]``; ``inf`` keeps the whole row.
        total: float32 ``[N, 1]``, the mass that ``top_p`` is a fraction of.

    Returns:
        float32 ``[N, 1]``: keep ``weights >= threshold``. 30 halvings of the 2^30 floats between
        0 and 1 find it exactly.
    """
    wanted = top_p[:, None] * total
    low = torch.zeros_like(wanted, dtype=torch.int32)
    high = torch.full_like(low, _ONE)
    for _ in range(30):
        middle = (low + high) >> 1
        above = torch.where(weights > middle.view(torch.float32), weights, 0.0)
        enough = above.sum(-1, keepdim=True) < wanted
        high = torch.where(enough, middle, high)
        low = torch.where(enough, low, middle + 1)
    return high.view(torch.float32)


def temper(logits: Tensor, temperature: Tensor) -> Tensor:
    """``(logits - max) / temperature``, float32 ``[N, V]``; the maximum becomes 0.

    Taking the maximum off first changes no probability, and lets a temperature as small as it
    likes (down to 1e-30, in FP32) run into greedy instead of into overflow. A row without a finite
    maximum is not shifted. Temperature 0 (greedy) divides by 1.
    """
    divisor = torch.where(temperature == 0, 1.0, temperature)
    peak = logits.amax(-1, keepdim=True)
    return (logits - peak.masked_fill(~peak.isfinite(), 0.0)).div_(divisor[:, None])


def filter_logits(
    logits: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    *,
    max_top_k: int,
    any_top_p: bool,
    any_min_p: bool,
    top_p_within_top_k: bool,
) -> Tensor:
    """Top-k, then top-p of what is left, then min-p; what is dropped becomes ``-inf``.

    Args:
        logits: float32 ``[N, V]``, tempered: the row maximum is 0.
        top_k: int64 ``[N]``, 0 for off.
        top_p: float32 ``[N]``, ``inf`` for off.
        log_min_p: float32 ``[N]``, ``-inf`` for off.
        max_top_k: the largest ``top_k``, 0 if all are off.
        any_top_p: whether any ``top_p`` is on.
        any_min_p: whether any ``min_p`` is on.
        top_p_within_top_k: whether every row with top-p has top-k too, so that the bisection need
            only read the ``max_top_k`` best.
    """
    if max_top_k:
        logits = logits.masked_fill(logits < top_k_threshold(logits, top_k, max_top_k), -torch.inf)
    if any_top_p:
        weights = logits.exp()
        candidates = weights
        if top_p_within_top_k:
            candidates = weights.topk(min(max_top_k, weights.shape[-1]), dim=-1).values
        total = weights.sum(-1, keepdim=True)
        dropped = weights < top_p_threshold(candidates, top_p, total)
        logits = logits.masked_fill(dropped, -torch.inf)
    if any_min_p:
        logits = logits.masked_fill(logits < log_min_p[:, None], -torch.inf)
    return logits
