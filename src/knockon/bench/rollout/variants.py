"""What is timed side by side: a stage of the rollout, carried out by an implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from knockon.rollout import DominoRollout, FP8Head

BASE = "base"
STAGES = {
    BASE: "step-major packing and this rank's LM head, nothing else",
    "A": "K = 0, whole vocabulary gathered",
    "B": "pool of K, whole vocabulary gathered",
    "C": "pool of K, compact exchange",
}
IMPLEMENTATIONS = ("plain", "fused")
# LM heads that propose: that of the run's dtype, and an FP8 copy of it.
HEADS = ("auto", "fp8")

# Reads the static inputs it was made with. Returns tokens [B, steps], or base logits [T * B, N].
Program = Callable[[], Tensor]


@dataclass(frozen=True)
class Variant:
    """One column of the table. ``base`` has one implementation, the first of all.

    Attributes:
        head: the LM head, one of :data:`HEADS`.
    """

    stage: str
    implementation: str = IMPLEMENTATIONS[0]
    head: str = HEADS[0]

    @property
    def label(self) -> str:
        words = [self.stage]
        if self.proposes and self.implementation != IMPLEMENTATIONS[0]:
            words.insert(0, self.implementation)
        if self.head != HEADS[0]:
            words.insert(0, self.head)
        return " ".join(words)

    @property
    def proposes(self) -> bool:
        """Whether a chain of tokens comes out, rather than base logits."""
        return self.stage != BASE


def variants_of(
    stages: Sequence[str], implementations: Sequence[str], head: str = HEADS[0]
) -> tuple[Variant, ...]:
    """Base once, then every other stage by every implementation, all with the run's own LM head.

    With the ``"fp8"`` head, base and C by the last implementation once more with that.
    """
    base = [Variant(BASE)] if BASE in stages else []
    rest = [
        Variant(s, i)
        for i in implementations
        for s in stages
        if s != BASE and (s, i) != ("A", "fused")  # the kernels need a pool
    ]
    again: list[Variant] = []
    if head != HEADS[0]:
        last = implementations[-1]
        again = [Variant(BASE, head=head)] if base else []
        again += [Variant("C", last, head)] if "C" in stages else []
    return (*base, *rest, *again)


def rollout_of(
    variant: Variant, rollout: DominoRollout, pool_size: int, fp8_head: FP8Head | None = None
) -> DominoRollout:
    """The rollout that carries out ``variant``, sharing weights and gate table with ``rollout``.

    Args:
        fp8_head: what a variant of that head takes its base logits from.
    """
    if variant.stage == "A":
        return rollout.with_settings(0, "full", "plain")
    exchange = "full" if variant.stage == "B" else "compact"
    lm_head = fp8_head if variant.head == "fp8" else None
    return rollout.with_settings(pool_size, exchange, variant.implementation, lm_head)


def base_program(
    draft_hidden: Tensor, lm_head: Tensor | FP8Head, steps: int, *, shift_label: bool
) -> Program:
    """What DFlash alone pays: rows packed step-major, then this rank's LM head over all of them.

    Args:
        draft_hidden: ``[B, L, H]``.
        lm_head: ``[num_padded, H]``, or a copy of it in FP8.
    """
    first = 0 if shift_label else 1

    def run() -> Tensor:
        z = draft_hidden[:, first : first + steps].transpose(0, 1)
        packed = z.reshape(-1, z.shape[-1])
        return F.linear(packed, lm_head) if isinstance(lm_head, Tensor) else lm_head(packed)

    return run


def rollout_program(
    rollout: DominoRollout, draft_hidden: Tensor, bonus: Tensor, steps: int
) -> Program:
    """The whole rollout, choosing as it does inside a CUDA graph."""
    return lambda: rollout(draft_hidden, bonus, steps, in_graph=True)
