"""Stage C: ranks exchange their best ids and scores, then only the pool's base logits.

Two collectives a block, whatever the number of ranks: one gather of offers, one sum that rebuilds
the pool's base logits. Without corrected rows (``T <= p``) the gather alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from knockon.parallel import Group, VocabShard
from knockon.rollout import order, pool
from knockon.rollout.candidates import Candidates
from knockon.rollout.fused.pool_base import own_pool_base_plain


def exchange_compact(
    local: Tensor, shard: VocabShard, group: Group, prefix: int, pool_size: int
) -> tuple[list[Tensor], Candidates | None]:
    """The prefix rows' tokens (each ``[B]``) and the candidates, the same on every rank.

    Args:
        local: this rank's base logits ``[T, B, num_padded]``.
        shard: what this rank holds.
        prefix: ``min(p, T)``.
        pool_size: ``0 < K < V``.
    """
    steps, batch, padded = local.shape
    offers = [_best_of_row(local[j], shard) for j in range(prefix)]
    offered = min(pool_size, padded) if steps > prefix else 0
    if offered:
        score = pool.scores(local[prefix:], shard.num_org)
        position = pool.choose(score, offered)
        offers.append((_ranks(score, position, shard), position))
    scores, positions = zip(*offers, strict=True)
    all_scores, all_ids = _gather_offers(
        torch.cat(scores, -1), torch.cat(positions, -1) + shard.start, group
    )
    # Ranks hold ascending ids and each offers its own in ascending order, so the first of equal
    # scores, in rank order, is the lowest id.
    tokens = []
    for j in range(prefix):
        winner = all_scores[:, :, j].argmax(dim=-1, keepdim=True)
        tokens.append(all_ids[:, :, j].gather(-1, winner).squeeze(-1))
    if not offered:
        return tokens, None
    merged = all_scores[:, :, prefix:].reshape(batch, -1)
    chosen = order.best_positions(merged, pool_size)
    ids = all_ids[:, :, prefix:].reshape(batch, -1).gather(-1, chosen)
    return tokens, Candidates(ids, _rebuild(local[prefix:], ids, shard, group))


def _best_of_row(row: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Rank and position of the best real id of ``row [B, num_padded]``, ``[B, 1]`` each."""
    if shard.num_org:
        position = order.argmax(row[:, : shard.num_org]).unsqueeze(1)
    else:
        position = torch.zeros((len(row), 1), dtype=torch.int64, device=row.device)
    return _ranks(row, position, shard), position


def _ranks(logits: Tensor, position: Tensor, shard: VocabShard) -> Tensor:
    """Ranks of ``logits [B, num_padded]`` at ``position [B, n]``, padding below all."""
    ranked = order.small_ranks(logits.gather(-1, position))
    if shard.num_org < shard.num_padded:
        padding = order.padding_rank(ranked.dtype)
        ranked.masked_fill_(position >= shard.num_org, padding)
    return ranked


def _gather_offers(scores: Tensor, ids: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Every rank's ``scores`` and ``ids [B, n]``, as ``[B, R, n]`` each, in one collective."""
    if group.size == 1:
        return scores.unsqueeze(1), ids.unsqueeze(1)
    integer = torch.int32 if scores.element_size() == 4 else torch.int64
    offers = torch.stack((scores.view(integer), ids.to(integer)))
    gathered = offers.new_empty((group.size, *offers.shape))
    group.all_gather(gathered, offers)
    rank_minor = gathered.permute(1, 2, 0, 3).contiguous()
    return rank_minor[0].view(scores.dtype), rank_minor[1].to(torch.int64)


def _rebuild(local: Tensor, ids: Tensor, shard: VocabShard, group: Group) -> Tensor:
    """Base logits of ``ids [B, K]``, each from the one rank that holds it: ``[T - p, B, K]``."""
    if group.size == 1:
        return local.gather(-1, (ids - shard.start).expand(local.shape[0], -1, -1))
    base = own_pool_base_plain(local, ids, shard.start, shard.num_org)
    group.all_reduce(base)  # every other rank adds zeros, so the sum is exact
    return base
