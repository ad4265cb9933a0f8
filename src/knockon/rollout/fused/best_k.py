"""The merge of the ranks' offers to one pool."""

from __future__ import annotations

from torch import Tensor

from knockon.rollout.fused.best_kernels import choose_best
from knockon.rollout.fused.keys import SENTINEL
from knockon.rollout.fused.select_launch import BestLaunch, best_launch
from knockon.rollout.fused.select_plain import best_k_plain
from knockon.triton_backend import runs_on


def best_k(keys: Tensor, ids: Tensor, k: int) -> Tensor:
    """The ids of the ``k`` best keys of each request, equal keys to the lowest id.

    Args:
        keys: ``[B, M]`` int32; sentinels (:data:`~knockon.rollout.fused.keys.SENTINEL`)
            anywhere, at least ``k`` others.
        ids: ``[B, M]`` int32, ascending along each row, sentinels apart: offers of
            ranks in rank order are.
        k: 1 to ``M``.

    Returns:
        ``[B, k]`` int32, ascending.
    """
    keys, ids = keys.contiguous(), ids.contiguous()
    return best_k_kernel(keys, ids, k) if runs_on(keys) else best_k_plain(keys, ids, k)


def best_k_kernel(keys: Tensor, ids: Tensor, k: int) -> Tensor:
    """:func:`best_k` by the kernel, on a GPU or in Triton's interpreter."""
    batch, entries = keys.shape
    return launch_best_k(keys, ids, k, best_launch(batch, entries))


def launch_best_k(keys: Tensor, ids: Tensor, k: int, launch: BestLaunch) -> Tensor:
    """:func:`best_k_kernel` with launch settings of the caller's."""
    batch, entries = keys.shape
    out = ids.new_empty((batch, k))
    choose_best[(batch, launch.parts)](
        keys,
        ids,
        out,
        k,
        entries,
        # A multiple of 16 lets whole vectors be loaded.
        -(-entries // (16 * launch.parts)) * 16,
        PADDING=SENTINEL,
        PARTS=launch.parts,
        TILE=launch.tile,
        STRIDE=1 << 32,
        num_warps=launch.warps,
    )
    return out
