"""The plain twin of the fused chain."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from knockon.rollout import order
from knockon.rollout.fused.chain import ChainWeights, PoolBase


def run_chain_plain(
    weights: ChainWeights,
    draft_part: Tensor,
    bonus: Tensor,
    tokens: Tensor,
    pool_ids: Tensor,
    base: PoolBase,
    prefix: int,
) -> None:
    """As :func:`~knockon.rollout.fused.chain.run_chain`, in FP32 PyTorch."""
    ids = pool_ids.long().sort(-1).values
    if base.indexed:
        logits = base.logits[prefix:].gather(-1, ids.expand(len(draft_part), -1, -1))
    else:
        order_of = pool_ids.long().argsort(-1)
        logits = base.logits.gather(-1, order_of.expand(len(draft_part), -1, -1))
    rows = weights.correction_out[ids].float()  # [B, K, E]
    gru = weights.table.shape[1] // 3
    w_state, w_hidden = weights.stacked.float().split([3 * gru, len(weights.stacked) - 3 * gru])
    state = draft_part.new_zeros((len(bonus), w_state.shape[1]))
    token = bonus
    for j in range(tokens.shape[1]):
        i_r, i_u, i_n = weights.table[token].float().chunk(3, -1)
        h_r, h_u, h_n = F.linear(state, w_state).chunk(3, -1)
        reset, update = torch.sigmoid(i_r + h_r), torch.sigmoid(i_u + h_u)
        new = torch.tanh(i_n + reset * h_n)
        state = new + update * (state - new)
        if j >= prefix:
            hidden = F.silu(draft_part[j - prefix] + F.linear(state, w_hidden))
            total = torch.einsum("bke,be->bk", rows, hidden) + logits[j - prefix].float()
            tokens[:, j] = ids.gather(1, order.argmax(total)[:, None]).squeeze(1)
        token = tokens[:, j]
