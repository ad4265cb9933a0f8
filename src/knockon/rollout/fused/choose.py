"""Whether a rollout takes the fused kernels."""

from __future__ import annotations

import torch

from knockon.errors import Refused
from knockon.rollout.fused.backend import interpreted, triton
from knockon.rollout.fused.chain_pieces import MAX_VOCAB
from knockon.rollout.head import DominoHead

IMPLEMENTATIONS = ("auto", "plain", "fused")


def choose_implementation(
    choice: str, head: DominoHead, tabulated: bool, pool_size: int
) -> tuple[str, str]:
    """``"plain"`` or ``"fused"``, and why ``auto`` fell back to the former.

    Args:
        choice: one of :data:`IMPLEMENTATIONS`.
        head: the Domino head.
        tabulated: whether the input gates stand in a table.
        pool_size: ``K``; 0 scores the whole vocabulary.

    Raises:
        Refused: an unknown choice, or ``"fused"`` where the kernels cannot run or do not fit.
    """
    if choice not in IMPLEMENTATIONS:
        raise Refused("implementation", choice, f"one of {IMPLEMENTATIONS}")
    if choice == "plain":
        return "plain", ""
    reason = _obstacle(head, tabulated, pool_size)
    if choice == "fused":
        if reason == _NO_GPU and interpreted():
            return "fused", ""
        if reason:
            raise Refused("implementation", choice, "plain", f"The kernels do not do {reason}")
    return ("plain", reason) if reason else ("fused", "")


_NO_GPU = "devices other than CUDA GPUs"


def _obstacle(head: DominoHead, tabulated: bool, pool_size: int) -> str:
    if triton is None:
        return "without Triton"
    if head.dtype == torch.float64:
        return "FP64"
    if not tabulated:
        return "input gates computed in every step (gate_table is off)"
    if pool_size == 0:
        return "the whole vocabulary as a pool (K = 0)"
    if head.vocab_size > MAX_VOCAB:
        return f"vocabularies of more than {MAX_VOCAB} ids"
    return "" if head.device.type == "cuda" else _NO_GPU
