"""What is timed side by side: a stage of the rollout, carried out by an implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from knockon.rollout import DominoRollout

BASE = "base"
STAGES = {
    BASE: "step-major packing and this rank's LM head, nothing else",
    "A": "K = 0, whole vocabulary gathered",
    "B": "pool of K, whole vocabulary gathered",
    "C": "pool of K, compact exchange",
}
IMPLEMENTATIONS = ("plain", "fused")

# Reads the static inputs it was made with. Returns tokens [B, steps], or base logits [T * B, N].
Program = Callable[[], Tensor]


@dataclass(frozen=True)
class Variant:
    """One column of the table. ``base`` has one implementation, the first of all."""

    stage: str
    implementation: str = IMPLEMENTATIONS[0]

    @property
    def label(self) -> str:
        if self.stage == BASE or self.implementation == IMPLEMENTATIONS[0]:
            return self.stage
        return f"{self.implementation} {self.stage}"

    @property
    def proposes(self) -> bool:
        """Whether a chain of tokens comes out, rather than base logits."""
        return self.stage != BASE


def variants_of(stages: Sequence[str], implementations: Sequence[str]) -> tuple[Variant, ...]:
    """Base once, then every other stage by every implementation."""
    base = [Variant(BASE)] if BASE in stages else []
    rest = [
        Variant(s, i)
        for i in implementations
        for s in stages
        if s != BASE and (s, i) != ("A", "fused")  # the kernels need a pool
    ]
    return (*base, *rest)


def rollout_of(variant: Variant, rollout: DominoRollout, pool_size: int) -> DominoRollout:
    """The rollout that carries out ``variant``, sharing weights and gate table with ``rollout``."""
    if variant.stage == "A":
        return rollout.with_settings(0, "full", "plain")
    exchange = "full" if variant.stage == "B" else "compact"
    return rollout.with_settings(pool_size, exchange, variant.implementation)


def base_program(
    draft_hidden: Tensor, lm_head: Tensor, steps: int, *, shift_label: bool
) -> Program:
    """What DFlash alone pays: rows packed step-major, then this rank's LM head over all of them.

    Args:
        draft_hidden: ``[B, L, H]``.
        lm_head: ``[num_padded, H]``.
    """
    first = 0 if shift_label else 1

    def run() -> Tensor:
        z = draft_hidden[:, first : first + steps].transpose(0, 1)
        return F.linear(z.reshape(-1, z.shape[-1]), lm_head)

    return run


def rollout_program(
    rollout: DominoRollout, draft_hidden: Tensor, bonus: Tensor, steps: int
) -> Program:
    """The whole rollout, choosing as it does inside a CUDA graph."""
    return lambda: rollout(draft_hidden, bonus, steps, in_graph=True)
