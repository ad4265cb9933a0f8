"""What a block's corrected rows choose from, once the ranks have exchanged it.

Sizes: ``T`` rows (steps) of the block, ``p`` of them prefix rows, ``B`` requests, ``R`` ranks,
``K`` pool size, ``N`` rows of a shard with padding (``num_padded``). Rows are step-major.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from knockon.parallel import Group
from knockon.rollout import order, pool
from knockon.rollout.layout import VocabLayout


@dataclass(frozen=True)
class Candidates:
    """One pool per request, and the base logits of its ids.

    Attributes:
        ids: ``[B, K]`` int64, ascending, so that the first of equal sums is the lowest id.
        base: ``[T - p, B, K]`` in the head's dtype.
    """

    ids: Tensor
    base: Tensor


class GatheredLogits:
    """Base logits of the whole vocabulary, as the ranks' shards ``[R, T, B, N]``.

    They are never joined into one ``[T, B, V]`` tensor, which would be a second full copy.
    """

    def __init__(self, layout: VocabLayout, logits: Tensor) -> None:
        self.layout = layout
        self.logits = logits

    def row(self, j: int) -> Tensor:
        """Base logits of row ``j``, ``[B, V]``, padding dropped."""
        shards = self.layout.shards
        parts = [self.logits[s.rank, j, :, : s.num_org] for s in shards if s.num_org]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def at(self, ids: Tensor, first: int) -> Tensor:
        """Base logits of ``ids [B, K]`` in rows from ``first``: ``[T - first, B, K]``."""
        _, steps, batch, _ = self.logits.shape
        if self.logits.shape[0] == 1:
            return self.logits[0, first:].gather(-1, ids.expand(steps - first, -1, -1))
        owner, position = self.layout.locate(ids)
        row = torch.arange(first, steps, device=ids.device)[:, None, None]
        request = torch.arange(batch, device=ids.device)[:, None]
        return self.logits[owner, row, request, position]


def gather_full(local: Tensor, layout: VocabLayout, group: Group) -> GatheredLogits:
    """Exchange of stages A and B: every rank's ``local [T, B, N]`` to every rank, in one gather."""
    if group.size == 1:
        return GatheredLogits(layout, local.unsqueeze(0))
    gathered = local.new_empty((group.size, *local.shape))
    group.all_gather(gathered, local)
    return GatheredLogits(layout, gathered)


def prefix_tokens(gathered: GatheredLogits, prefix: int) -> list[Tensor]:
    """The plain argmax of the first ``prefix`` rows over the whole vocabulary: each ``[B]``."""
    return [order.argmax(gathered.row(j)) for j in range(prefix)]


def pool_of_gathered(gathered: GatheredLogits, prefix: int, pool_size: int) -> Candidates:
    """Stage B: the ``K`` ids whose best base logit over the corrected rows is highest."""
    shards = gathered.layout.shards
    if len(shards) == 1:
        score = pool.scores(gathered.logits[0, prefix:], shards[0].num_org)
    else:
        held = [s for s in shards if s.num_org]
        parts = [pool.scores(gathered.logits[s.rank, prefix:], s.num_org) for s in held]
        score = torch.cat([x[:, : s.num_org] for x, s in zip(parts, held, strict=True)], dim=-1)
    ids = pool.choose(score, pool_size)
    return Candidates(ids, gathered.at(ids, prefix))
