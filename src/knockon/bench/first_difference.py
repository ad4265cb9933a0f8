"""Why a rollout's chain first leaves the one that was read in FP64.

The rollout's own base logits, then its own table of input gates, then both are put into the
reading. What first gives the rollout's token is the cause.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from knockon.rollout.batched_reference import BatchedReference, choose, pool_mask, scores

BASE, GATES, BOTH, SUMS = "base logits", "input gates", "base logits and gates", "sums"
UNEXPLAINED = "unexplained"
CAUSES = (BASE, GATES, BOTH, SUMS, UNEXPLAINED)


@dataclass(frozen=True)
class FirstDifference:
    """One chain's first difference.

    Attributes:
        block, row: which block, which proposal of it.
        wanted, found: the id that was read, and the rollout's.
        margin: in the reading, by how much ``wanted`` beats ``found``: their sums or, at the
            pool's cutoff, the score of the one that changed sides less the cutoff.
        moved: by how much the rollout's base logits and gates move the two towards each other.
        spacing: distance between neighbouring numbers of the head's dtype at the larger of the two
            base logits (scores). Rounding moves each by at most half of it.
        at_cutoff: one of the two is in one pool only.
        cause: one of ``CAUSES``; ``"sums"`` is the rounding of sums in FP32 (FP64).
    """

    block: int
    row: int
    wanted: int
    found: int
    margin: float
    moved: float
    spacing: float
    at_cutoff: bool
    cause: str


@dataclass(frozen=True)
class Reading:
    """One block as it was read or as it was rolled out.

    Attributes:
        reference: with the input gates of this reading.
        base: base logits ``[T, V]`` FP64.
    """

    reference: BatchedReference
    base: Tensor


def explain(
    block: int,
    rows: Tensor,
    bonus: Tensor,
    wanted: Tensor,
    found: Tensor,
    read: Reading,
    rolled: Reading,
    dtype: torch.dtype,
    pool_size: int,
) -> FirstDifference:
    """Explain where ``found [T]`` first leaves ``wanted [T]``.

    Args:
        rows: the block's ``[T, H]`` that propose.
        bonus: scalar.
        read: what gave ``wanted``.
        rolled: the parts of the rollout that gave ``found``.
        dtype: of the rollout.
    """
    row = int((wanted != found).nonzero()[0])
    a, b = int(wanted[row]), int(found[row])
    p = read.reference.prefix_len
    exact = _correction(read, row, rows, bonus, wanted)
    rounded = _correction(rolled, row, rows, bonus, wanted)
    pool, rolled_pool = (_pool(r.base, p, row, pool_size) for r in (read, rolled))
    sums, rolled_sums = read.base[row] + exact, rolled.base[row] + rounded

    at_cutoff = bool((pool != rolled_pool)[[a, b]].any())
    if at_cutoff:
        before, after = scores(read.base[p:].unsqueeze(0))[0], scores(rolled.base[p:].unsqueeze(0))
        upper, lower = _sides(before, pool, a, b)
        sizes, margin = before[[upper, lower]], float(before[upper] - before[lower])
        moved = margin - float(after[0, upper] - after[0, lower])
    else:
        sizes, margin = read.base[row, [a, b]], float(sums[a] - sums[b])
        moved = margin - float(rolled_sums[a] - rolled_sums[b])

    def gives(base: Tensor, pool: Tensor, correction: Tensor, slack: float = 0.0) -> bool:
        total = (base[row] + correction).unsqueeze(0)
        best, _ = choose(total, pool.unsqueeze(0))
        return bool(pool[b]) and (int(best) == b or float(total[0, best] - total[0, b]) < slack)

    if gives(rolled.base, rolled_pool, exact):
        cause = BASE
    elif gives(read.base, pool, rounded):
        cause = GATES
    elif gives(rolled.base, rolled_pool, rounded):
        cause = BOTH
    else:
        # The prefix is an argmax without sums.
        slack = sum_rounding(sums[[a, b]], dtype) if row >= p else 0.0
        cause = SUMS if gives(rolled.base, rolled_pool, rounded, slack) else UNEXPLAINED
    spacing = max(_spacing(x, dtype) for x in sizes.tolist())
    return FirstDifference(block, row, a, b, margin, moved, spacing, at_cutoff, cause)


def sum_rounding(sums: Tensor, dtype: torch.dtype) -> float:
    """A generous bound on what the order of a correction's sums can move in a rollout."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return 64 * torch.finfo(wide).eps * (1 + float(sums.abs().max()))


def _correction(by: Reading, row: int, rows: Tensor, bonus: Tensor, chain: Tensor) -> Tensor:
    """``c_row [V]`` after the chain's tokens before it; zero in the prefix."""
    if row < by.reference.prefix_len:
        return torch.zeros_like(by.base[0])
    before = chain[:row].unsqueeze(0)
    return by.reference.correction_after(rows[row].unsqueeze(0), bonus.view(1), before)[0]


def _pool(base: Tensor, prefix: int, row: int, pool_size: int) -> Tensor:
    """``[V]``: what ``row`` may choose from."""
    if row < prefix:
        return torch.ones_like(base[0], dtype=torch.bool)
    return pool_mask(base[prefix:].unsqueeze(0), pool_size)[0]


def _sides(score: Tensor, pool: Tensor, a: int, b: int) -> tuple[int, int]:
    """The id within the pool and the id outside it that changed sides."""
    if not pool[b]:
        return int(score.masked_fill(~pool, torch.inf).argmin()), b
    return a, int(score.masked_fill(pool, -torch.inf).argmax())


def _spacing(x: float, dtype: torch.dtype) -> float:
    """Distance from ``|x|`` to the next number of ``dtype``."""
    if x == 0 or not math.isfinite(x):
        return torch.finfo(dtype).tiny
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(abs(x)))
