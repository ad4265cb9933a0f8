"""The oracle: the rollout as the specification writes it, in FP64, row by row, on one rank.

Slow on purpose. Only the roundings that the specification fixes are made: base logits to the LM
head's dtype, tabulated input gates to the weights' dtype; everything else is FP64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from knockon.rollout.head import DominoHead


def rank_of(logit: float) -> tuple[int, float]:
    """Sort key of a logit, larger is better: numbers by value (``-0.0 == 0.0``), NaN below all."""
    return (0, 0.0) if math.isnan(logit) else (1, logit)


def best(logits: list[float], ids: list[int]) -> int:
    """The id with the highest logit, the lowest id of exact ties."""
    return min(ids, key=lambda v: (_descending(rank_of(logits[v])), v))


def _descending(rank: tuple[int, float]) -> tuple[int, float]:
    return (-rank[0], -rank[1])


def candidate_pool(rows: list[list[float]], pool_size: int) -> list[int]:
    """The ``K`` ids of highest ``max_j base_j[v]``, ascending; cutoff ties to the lowest id."""
    score = [max(rank_of(row[v]) for row in rows) for v in range(len(rows[0]))]
    by_score = sorted(range(len(score)), key=lambda v: (_descending(score[v]), v))
    return sorted(by_score[:pool_size])


def base_logits(lm_head: Tensor, z: Tensor) -> Tensor:
    """``LMHead(z)`` of ``[V, H]`` and ``[..., H]``, rounded once to the head's dtype."""
    return (z.to(lm_head.dtype).double() @ lm_head.double().t()).to(lm_head.dtype)


def reference_rollout(
    head: DominoHead,
    embedding: Tensor,
    lm_head: Tensor | None,
    draft_hidden: Tensor,
    bonus: Tensor,
    steps: int,
    pool_size: int = 0,
    *,
    base: Tensor | None = None,
    gate_table: bool = True,
) -> Tensor:
    """``[B, steps]`` int64, the proposals of each request.

    Args:
        head: the Domino head.
        embedding: ``[V, H]``.
        lm_head: ``[V, H]``; not needed where ``base`` is given.
        draft_hidden: ``Z [B, L, H]``.
        bonus: ``[B]``.
        steps: number of proposals.
        pool_size: ``K``; 0, or ``V`` and more, scores the whole vocabulary.
        base: base logits ``[B, steps, V]`` in the LM head's dtype, in place of ``LMHead(z)``.
        gate_table: whether input gates are rounded to the weights' dtype, as a table does.
    """
    chains = []
    for b in range(len(bonus)):
        offset = 0 if head.shift_label else 1
        z = draft_hidden[b, offset : offset + steps]
        if base is not None:
            logits = base[b]
        elif lm_head is not None:
            logits = base_logits(lm_head, z)
        else:
            raise TypeError("either lm_head or base is needed")
        chain = _chain(head, embedding, z.double(), logits, int(bonus[b]), pool_size, gate_table)
        chains.append(chain)
    return torch.tensor(chains, dtype=torch.int64).reshape(len(bonus), steps)


def _chain(
    head: DominoHead,
    embedding: Tensor,
    z: Tensor,
    base: Tensor,
    bonus: int,
    pool_size: int,
    gate_table: bool,
) -> list[int]:
    vocabulary = list(range(head.vocab_size))
    steps, p = len(z), head.prefix_len
    rows = base.double().tolist()
    pool = vocabulary
    if 0 < pool_size < head.vocab_size and steps > p:
        pool = candidate_pool(rows[p:], pool_size)
    w1, w2 = head.correction_in.double(), head.correction_out.double()

    state = torch.zeros(head.gru_size, dtype=torch.float64)
    token = bonus
    chain: list[int] = []
    for j in range(steps):
        state = _gru_cell(head, embedding[token], state, gate_table)
        if j < p:
            token = best(rows[j], vocabulary)
        else:
            pre = w1 @ torch.cat((z[j], state))
            correction = w2 @ (pre * torch.sigmoid(pre))
            token = best((base[j].double() + correction).tolist(), pool)
        chain.append(token)
    return chain


def _gru_cell(head: DominoHead, x: Tensor, state: Tensor, gate_table: bool) -> Tensor:
    from_input = head.gru_input.double() @ x.double()
    if gate_table:
        from_input = from_input.to(head.dtype).double()
    from_state = head.gru_state.double() @ state
    i_reset, i_update, i_new = from_input.chunk(3)
    h_reset, h_update, h_new = from_state.chunk(3)
    reset = torch.sigmoid(i_reset + h_reset)
    update = torch.sigmoid(i_update + h_update)
    new = torch.tanh(i_new + reset * h_new)
    return (1 - update) * new + update * state
