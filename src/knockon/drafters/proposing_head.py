"""The LM head that drafters propose with: the target's own, or an FP8 copy of it."""

from __future__ import annotations

from torch import Tensor

from knockon.drafters.base import DraftReport
from knockon.models.target import Target
from knockon.rollout import FP8Head, order


class ProposingHead:
    """Every row's most likely token.

    Args:
        target: whose LM head is borrowed.
        fp8: a copy of it to propose with; ``None`` for the head itself.
    """

    def __init__(self, target: Target, fp8: FP8Head | None = None) -> None:
        self.target = target
        self.fp8 = fp8

    def argmax(self, z: Tensor) -> Tensor:
        """``z [..., H]``, contiguous, to token ids ``[...]``, equal on all ranks."""
        if self.fp8 is None:
            return order.argmax(self.target.logits(z))
        return order.argmax(self.target.lm_head.gather(self.fp8(z)))

    def report(self) -> DraftReport:
        """The head that proposes, and what a copy of it takes."""
        if self.fp8 is None:
            return DraftReport(head_dtype=str(self.target.dtype).removeprefix("torch."))
        return DraftReport(head_dtype="fp8", head_bytes=self.fp8.num_bytes)
