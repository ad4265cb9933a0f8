"""Pool selection and the merge of offers in plain PyTorch: what the kernels must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from knockon.rollout.fused.keys import SENTINEL, keys_of
from knockon.rollout.fused.selected import Selected
from knockon.rollout.order import best_positions_by_sorting


def select_plain(
    local: Tensor, num_org: int, start: int, prefix: int, k: int, nan_rows: Tensor
) -> Selected:
    """The twin of :func:`~knockon.rollout.fused.select.select`, same signature."""
    rows, batch, width = local.shape
    nan_rows += local[..., :num_org].isnan().any(-1).sum()
    keys = keys_of(local)
    keys[..., num_org:] = SENTINEL
    position = keys[:prefix].argmax(-1, keepdim=True)
    prefix_keys = keys[:prefix].gather(-1, position)[..., 0].t().contiguous()
    prefix_ids = (position[..., 0].t() + start).to(torch.int32).contiguous()
    if prefix == rows:
        empty = prefix_ids.new_empty((batch, 0))
        return Selected(prefix_keys, prefix_ids, empty, empty.clone())
    score = keys[prefix:].amax(0)
    pool = best_positions_by_sorting(score, min(k, width))
    return Selected(prefix_keys, prefix_ids, score.gather(-1, pool), (pool + start).to(torch.int32))


def best_k_plain(keys: Tensor, ids: Tensor, k: int) -> Tensor:
    """The twin of :func:`~knockon.rollout.fused.best_k.best_k`, same signature."""
    return ids.gather(-1, best_positions_by_sorting(keys, k))
