"""The paged attention backend: Triton kernels that read lengths and pages on the device."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from knockon.layers.attention.base import BlockPlan, PagedKV, Visibility
from knockon.layers.attention.paged_kernels import attend_pages, store_rows, sum_parts
from knockon.layers.attention.paged_launch import (
    MOST_BLOCK_ROWS,
    AttentionLaunch,
    attention_launch,
)
from knockon.layers.fused.pdl import pdl
from knockon.triton_backend import power_of_two

# Elements of the partial sums that one program of the summing kernel holds.
_SUM_TILE = 4096


class PagedBackend:
    """Attends in place, whatever the contexts' lengths; :class:`SdpaBackend` is its plain twin.

    Nothing is read back to the host and no launch depends on data, so that calls can be captured
    in a CUDA graph. Runs on a GPU or in Triton's interpreter. Keys and values lie contiguous in
    their slots, rows of positions and page tables are contiguous.
    """

    name = "triton"
    reads_lengths = True

    def write(self, k: Tensor, v: Tensor, kv: PagedKV, plan: BlockPlan) -> None:
        """Store ``k, v [B, T, kv_heads, head_dim]`` at ``plan.slots``; one launch."""
        k, v = _dense_heads(k), _dense_heads(v)
        batch, rows, kv_heads, dim = k.shape
        block_h, block_d = power_of_two(kv_heads), power_of_two(dim)
        store_rows[(batch * rows,)](
            k,
            v,
            *kv,
            plan.slots,
            rows,
            *k.stride()[:3],
            *v.stride()[:3],
            KV_HEADS=kv_heads,
            HEAD_DIM=dim,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            num_warps=max(1, min(8, block_h * block_d // 512)),
            **pdl(k),
        )

    def attend(self, q: Tensor, kv: PagedKV, plan: BlockPlan, visibility: Visibility) -> Tensor:
        """``q [B, T, heads, head_dim]`` to ``[B, T, heads * head_dim]``; scale 1/sqrt(head_dim).

        One launch, or two where programs share a context.

        Raises:
            Refused: ``head_dim`` above 256.
        """
        batch, rows, heads, dim = q.shape
        kv_heads = kv.k.shape[1]
        launch = attention_launch(
            batch,
            rows,
            heads // kv_heads,
            kv_heads,
            dim,
            plan.page_table.shape[1] * plan.page_size,
            kv.k.element_size(),
            _multiprocessors(q.device),
        )
        return attend_kernel(q, kv, plan, visibility, launch)


def attend_kernel(
    q: Tensor, kv: PagedKV, plan: BlockPlan, visibility: Visibility, launch: AttentionLaunch
) -> Tensor:
    """:meth:`PagedBackend.attend` with given launch settings."""
    q = _dense_heads(q)
    batch, rows, heads, dim = q.shape
    kv_heads = kv.k.shape[1]
    group = heads // kv_heads
    out = q.new_empty((batch, rows, heads * dim))
    partial, weights = out, out
    splits = launch.splits
    if splits > 1:
        partial = q.new_empty((batch, rows, heads, splits, dim), dtype=torch.float32)
        weights = q.new_empty((batch, rows, heads, splits), dtype=torch.float32)
    attend_pages[(batch * kv_heads * -(-rows * group // launch.block_m), splits)](
        q,
        *kv,
        plan.positions,
        plan.page_table,
        partial,
        weights,
        math.log2(math.e) / math.sqrt(dim),
        rows,
        kv_heads,
        plan.page_table.shape[1] * plan.page_size,
        *q.stride()[:3],
        plan.positions.stride(0),
        plan.page_table.stride(0),
        HEAD_DIM=dim,
        GROUP=group,
        PAGE_SIZE=plan.page_size,
        CAUSAL=visibility.causal,
        WINDOW=visibility.window or 0,
        FIRST=visibility.first,
        SPLIT=splits > 1,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        NEAR=rows <= MOST_BLOCK_ROWS,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_D=max(16, power_of_two(dim)),
        num_warps=launch.warps,
        num_stages=launch.stages,
        **pdl(q),
    )
    if splits > 1:
        block_p = power_of_two(splits)
        block_d = min(power_of_two(dim), max(32, _SUM_TILE // block_p))
        sum_parts[(batch * rows * heads, -(-dim // block_d))](
            partial,
            weights,
            out,
            splits,
            HEAD_DIM=dim,
            BLOCK_P=block_p,
            BLOCK_D=block_d,
            num_warps=max(1, min(4, block_p * block_d // 512)),
            **pdl(q),
        )
    return out


def _dense_heads(x: Tensor) -> Tensor:
    """``x`` with the elements of a head contiguous, as in any view into a fused projection."""
    return x if x.stride(-1) == 1 else x.contiguous()


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8  # the interpreter runs programs in turn: few splits, yet some
    found: int = torch.cuda.get_device_properties(device).multi_processor_count
    return found
