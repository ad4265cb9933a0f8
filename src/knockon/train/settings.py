"""How a drafter is trained, as the loop wants it."""

from __future__ import annotations

from dataclasses import dataclass

from knockon.errors import Refused

OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True)
class TrainSettings:
    """How a drafter is trained.

    Attributes:
        steps, minutes: exactly one is set; the schedule (rate, lambda) runs over it, so a run
            always ends annealed.
        batch_size, anchors: sequences a step (of all ranks together), blocks a sequence.
        optimizer: ``"adamw"``; or ``"muon"`` for the matrices of the layers, AdamW for the rest.
        warmup: share of the run over which the rate rises.
        gamma: row ``j`` weighs ``exp(-j / gamma)``.
        lambda_start, lambda_end: between what the base's own weight falls; see
            `objective.correction_lambda`.
        soft: share of the target's own distribution in the labels.
        chunk: rows whose logits live at once.
        held_out_every: steps between two replays of held-out sequences.
    """

    steps: int | None = None
    minutes: float | None = None
    batch_size: int = 64
    anchors: int = 24
    optimizer: str = "adamw"
    peak_rate: float = 1e-3
    warmup: float = 0.02
    weight_decay: float = 0.01
    clip: float = 1.0
    gamma: float = 7.0
    lambda_start: float = 1.0
    lambda_end: float = 0.3
    soft: float = 0.5
    chunk: int = 8192
    log_every: int = 50
    held_out_every: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise Refused("steps, minutes", (self.steps, self.minutes), "exactly one of the two")
        if self.optimizer not in OPTIMIZERS:
            raise Refused("optimizer", self.optimizer, f"one of {', '.join(OPTIMIZERS)}")
