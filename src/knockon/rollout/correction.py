"""The correction ``W2 · h`` added to the base logits, over the whole vocabulary or over a pool."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from knockon.rollout import order
from knockon.rollout.candidates import Candidates, GatheredLogits
from knockon.rollout.products import bmm_into, three_parts

_INF = float("inf")


class Correction(Protocol):
    """Chooses the token of a corrected row."""

    def choose(self, j: int, hidden: Tensor, token: Tensor) -> None:
        """``token = argmax (base_j + W2 · hidden)``: ``hidden [B, E]``, ``token [B]`` int64."""
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

    def choose(self, j: int, hidden: Tensor, token: Tensor) -> None:
        base = self.gathered.row(j).to(hidden.dtype)
        token.copy_(order.argmax(torch.addmm(base, hidden, self.weight)))


class PoolOnly:
    """``K > 0``: only the block's candidates are scored.

    Args:
        candidates: the pool and its base logits.
        weight: ``W2 [V, E]`` in the head's dtype; the pool's rows are read once per block.
        first: ``p``, the row that ``candidates.base[0]`` belongs to.
        dtype: FP32, or FP64.
        finite: whether all of ``W2`` is.
    """

    def __init__(
        self,
        candidates: Candidates,
        weight: Tensor,
        first: int,
        dtype: torch.dtype,
        finite: bool = False,
    ) -> None:
        batch, pool = candidates.ids.shape
        self.ids = candidates.ids
        self.first = first
        rows = weight.index_select(0, self.ids.reshape(-1)).view(batch, pool, -1)
        # Where logits have 16 bits, -inf has room below them in FP32 once and for all, and a
        # correction below 2**103 keeps it there (that is half a step at the end of FP32): sums
        # then compare as they are, but for NaN out of infinite activations. Otherwise each step
        # maps its sums to ranks.
        self.ordered = finite and candidates.base.element_size() == 2 and dtype == torch.float32
        self.base = candidates.base.to(dtype, copy=True)
        if self.ordered:
            lowest = torch.finfo(dtype).min
            self.base.nan_to_num_(nan=-float("inf"), posinf=float("inf"), neginf=lowest)
        self._prepare(rows, dtype)

    def _prepare(self, rows: Tensor, dtype: torch.dtype) -> None:
        self.columns = rows.to(dtype).transpose(1, 2)  # [B, E, K]
        self.base = self.base.unsqueeze(2)  # [T - p, B, 1, K]

    def _sums(self, row: int, hidden: Tensor) -> Tensor:
        """``[B, K]``, in place of the row's base logits, which no other step reads."""
        return self.base[row].baddbmm_(hidden.unsqueeze(1), self.columns).squeeze(1)

    def choose(self, j: int, hidden: Tensor, token: Tensor) -> None:
        sums = self._sums(j - self.first, hidden)
        if self.ordered:
            ranked = sums.nan_to_num_(nan=-_INF, posinf=_INF, neginf=-_INF)
        else:
            ranked = order.ranks(sums)
        best = ranked.argmax(dim=-1, keepdim=True)
        torch.gather(self.ids, 1, best, out=token.unsqueeze(1))


class PoolInParts(PoolOnly):
    """The same for a BF16 ``W2`` whose pool rows stay BF16: half the bytes a step.

    ``hidden`` goes in as three BF16 parts, whose products with BF16 weights are exact and summed in
    FP32, so the correction is an FP32 one as before.
    """

    def _prepare(self, rows: Tensor, dtype: torch.dtype) -> None:
        steps, batch, pool = self.base.shape
        terms = self.base.new_empty((steps, batch, 4, pool))
        terms[:, :, 3] = self.base
        self.base = terms
        self.columns = rows.transpose(1, 2)  # [B, E, K]

    def _sums(self, row: int, hidden: Tensor) -> Tensor:
        terms = self.base[row]
        bmm_into(terms[:, :3], three_parts(hidden), self.columns)
        return terms.sum(dim=1)


def reads_in_parts(
    pool_values: int, weight_dtype: torch.dtype, is_cuda: bool, *, cached_bytes: int = 32 << 20
) -> bool:
    """Whether a pool's rows of ``W2`` are kept in BF16: a pure choice by size.

    Splitting costs three small kernels a step, which pay once FP32 rows outgrow the GPU's cache.
    FP16 has too few exponents for its parts, so it is not split.

    Args:
        pool_values: ``B · K · E``, of the whole batch.
        cached_bytes: size of the largest FP32 rows that are read as they are.
    """
    return is_cuda and weight_dtype == torch.bfloat16 and 4 * pool_values > cached_bytes
