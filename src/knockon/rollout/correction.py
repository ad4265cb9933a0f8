"""The correction ``W2 · h`` added to the base logits, over the whole vocabulary or over a pool."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from knockon.rollout import order
from knockon.rollout.candidates import Candidates, GatheredLogits


class Correction(Protocol):
    """Chooses the token of a corrected row."""

    def choose(self, j: int, hidden: Tensor) -> Tensor:
        """``argmax (base_j + W2 · hidden)`` with ``hidden [B, E]``: ``[B]`` int64."""
        ...


class WholeVocabulary:
    """``K = 0``: every id is scored.

    Args:
        gathered: base logits of all rows.
        weight: ``W2 [V, E]`` in FP32 (FP64).
    """

    def __init__(self, gathered: GatheredLogits, weight: Tensor) -> None:
        self.gathered = gathered
        self.weight = weight.t()

    def choose(self, j: int, hidden: Tensor) -> Tensor:
        base = self.gathered.row(j).to(hidden.dtype)
        return order.argmax(torch.addmm(base, hidden, self.weight))


class PoolOnly:
    """``K > 0``: only the block's candidates are scored.

    Args:
        candidates: the pool and its base logits.
        weight: ``W2 [V, E]`` in the head's dtype; the pool's rows are read once per block.
        first: ``p``, the row that ``candidates.base[0]`` belongs to.
        dtype: FP32, or FP64.
    """

    def __init__(
        self, candidates: Candidates, weight: Tensor, first: int, dtype: torch.dtype
    ) -> None:
        batch, pool = candidates.ids.shape
        rows = weight.index_select(0, candidates.ids.reshape(-1)).to(dtype)
        self.weight = rows.view(batch, pool, -1).transpose(1, 2)
        self.base = candidates.base.to(dtype).unsqueeze(2)
        self.ids = candidates.ids
        self.first = first

    def choose(self, j: int, hidden: Tensor) -> Tensor:
        sums = torch.baddbmm(self.base[j - self.first], hidden.unsqueeze(1), self.weight)
        best = order.argmax(sums)  # [B, 1]
        return self.ids.gather(1, best).squeeze(1)
