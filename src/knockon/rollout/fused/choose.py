"""Whether a rollout takes the fused kernels."""

from __future__ import annotations

import torch

from knockon.errors import Refused
from knockon.rollout.fused.chain_pieces import MAX_VOCAB
from knockon.rollout.head import DominoHead
from knockon.triton_backend import interpreted, triton

LEAST_CAPABILITY = 8  # BF16 on the tensor cores
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
        if reason and not (reason == _NO_GPU and interpreted()):
            raise Refused(
                "implementation", choice, "plain", f"The fused kernels do not run: {reason}"
            )
        return "fused", ""
    return ("plain", reason) if reason else ("fused", "")


_NO_GPU = "the head is not on a CUDA GPU"


def _obstacle(head: DominoHead, tabulated: bool, pool_size: int) -> str:
    if triton is None:
        return "Triton is not installed"
    if head.dtype == torch.float64:
        return "the head is FP64"
    if not tabulated:
        return "the input gates are not tabulated (gate_table)"
    if pool_size == 0:
        return "K = 0, or K >= V, scores the whole vocabulary, which has no fused path"
    if head.vocab_size > MAX_VOCAB:
        return f"the vocabulary has more than {MAX_VOCAB} ids"
    if head.device.type != "cuda":
        return _NO_GPU
    major, minor = torch.cuda.get_device_capability(head.device)
    if major < LEAST_CAPABILITY:
        return f"compute capability {major}.{minor} is too old"
    return ""
