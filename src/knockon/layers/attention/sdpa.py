"""The reference attention backend: gather the context from its pages, then PyTorch's SDPA."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from knockon.layers.attention.base import BlockPlan, PagedKV, Visibility

# Fewer rows are multiplied by a kernel that sums in another order (seen on x86 CPUs).
_LEAST_ROWS = 4


class SdpaBackend:
    """Runs everywhere.

    The query heads of a KV group are folded into the row dimension, so that keys and values are
    never repeated: on a CPU this is five times faster than ``enable_gqa`` for one BF16 row.
    """

    name = "torch"
    reads_lengths = False

    def write(self, k: Tensor, v: Tensor, kv: PagedKV, plan: BlockPlan) -> None:
        """Store ``k, v [B, T, kv_heads, head_dim]`` at ``plan.slots``."""
        kv.write(k, v, plan.slots)

    def attend(self, q: Tensor, kv: PagedKV, plan: BlockPlan, visibility: Visibility) -> Tensor:
        """``q [B, T, heads, head_dim]`` to ``[B, T, heads * head_dim]``; scale 1/sqrt(head_dim)."""
        batch, rows, heads, dim = q.shape
        kv_heads = kv.k.shape[1]
        group = heads // kv_heads
        context = plan.context
        shape = (batch, context, kv_heads, dim)
        if plan.first_slot is not None:
            k, v = kv.read(slice(plan.first_slot, plan.first_slot + context), q.dtype)
        else:
            k, v = kv.read(plan.context_slots.flatten(), q.dtype)
        k, v = k.view(shape).transpose(1, 2), v.view(shape).transpose(1, 2)
        folded = q.view(batch, rows, kv_heads, group, dim).transpose(1, 2).flatten(2, 3)
        parts = []
        for segment in plan.segments if visibility.causal else (plan.whole,):
            part = folded[:, :, segment.first * group : segment.last * group]
            bias = plan.bias(segment, visibility, group, q.dtype)
            keys, values = k[:, :, : segment.context], v[:, :, : segment.context]
            parts.append(_attend(part, keys, values, bias))
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        out = out.unflatten(2, (rows, group)).transpose(1, 2)
        return out.reshape(batch, rows, heads * dim)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """``q [B, kv_heads, N, D]`` over ``k, v [B, kv_heads, C, D]`` with ``bias [B, 1, N, C]``."""
    rows = q.shape[2]
    missing = _LEAST_ROWS - rows
    if missing > 0:
        q = torch.cat((q, q[:, :, :1].expand(-1, -1, missing, -1)), dim=2)
        bias = torch.cat((bias, bias[:, :, :1].expand(-1, -1, missing, -1)), dim=2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)[:, :, :rows]
