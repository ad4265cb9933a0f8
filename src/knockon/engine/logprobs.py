"""Log-probabilities of drawn tokens, from the raw logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Logprobs(NamedTuple):
    """Log-probabilities at every row of a block.

    Attributes:
        chosen: float32 ``[B, w]``, of the drawn token.
        rank: int64 ``[B, w]``, 1 + how many tokens have a higher logit than it.
        top_ids: int64 ``[B, w, n]``, the most probable tokens, exact ties by ascending id.
        top_values: float32 ``[B, w, n]``, theirs, falling.
    """

    chosen: Tensor
    rank: Tensor
    top_ids: Tensor
    top_values: Tensor


def logprobs(logits: Tensor, tokens: Tensor, n: int) -> Logprobs:
    """Log-softmax in FP32 of the target's logits, before penalties, temperature and filters.

    Row ``i`` of the logits is the distribution that ``tokens[:, i]`` was drawn from, whether it
    was an accepted proposal or the bonus.

    Args:
        logits: float ``[B, w, V]``, as the target gave them.
        tokens: int64 ``[B, w]``, as drawn; where it is -1 (not emitted) the result means nothing.
        n: how many of the most probable tokens to report; at most ``V`` are there.
    """
    values = torch.log_softmax(logits.float().masked_fill(logits.isnan(), -torch.inf), -1)
    chosen = values.gather(-1, tokens.clamp(min=0)[..., None])
    rank = (values > chosen).sum(-1) + 1
    top_ids = _sortable(values).topk(min(n, values.shape[-1]), dim=-1).indices
    return Logprobs(chosen[..., 0], rank, top_ids, values.gather(-1, top_ids))


def _sortable(values: Tensor) -> Tensor:
    """int64 keys, all different, that order float32 ``values`` and break ties to the lower id.

    ``torch.topk`` promises no order among ties, and in BF16 ties are the rule. The upper half of
    the key orders as the floats do (their bits, those of negative ones flipped), NaN lowest.
    """
    values = values.masked_fill(values.isnan(), -torch.inf) + 0.0  # -0.0 becomes 0.0
    bits = values.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(values.shape[-1], device=values.device)
    return (ordered << 32) - ids
