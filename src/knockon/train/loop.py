"""The training loop: features on the fly, annealed by the clock or by a number of steps."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from knockon.errors import Refused
from knockon.train.cross_entropy import draft_cross_entropy
from knockon.train.drafter_module import DraftModule
from knockon.train.frozen_target import FrozenTarget
from knockon.train.mtp_module import MTPModule
from knockon.train.objective import (
    block_labels,
    correction_lambda,
    learning_rate,
    refuse_unsupervised,
    sample_anchors,
    teacher_tokens,
)
from knockon.train.sequences import BatchOrder, PackedSequences


@dataclass(frozen=True)
class TrainSettings:
    """How a drafter is trained.

    Attributes:
        steps, minutes: exactly one is set; the schedule (rate, lambda) runs over it, so a run
            always ends annealed.
        batch_size, anchors: sequences a step, blocks a sequence.
        warmup: share of the run over which the rate rises.
        gamma: row ``j`` weighs ``exp(-j / gamma)``.
        lambda_end: where the base's own weight ends; see `objective.correction_lambda`.
        soft: share of the target's own distribution in the labels.
        chunk: rows whose logits live at once.
    """

    steps: int | None = None
    minutes: float | None = None
    batch_size: int = 64
    anchors: int = 24
    peak_rate: float = 1e-3
    warmup: float = 0.02
    weight_decay: float = 0.01
    clip: float = 1.0
    gamma: float = 7.0
    lambda_end: float = 0.3
    soft: float = 0.5
    chunk: int = 8192
    log_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise Refused("steps, minutes", (self.steps, self.minutes), "exactly one of the two")


class Trainer:
    """State of one run: weights, optimizer, how far it has come.

    The optimizer works on FP32 master weights; the module computes with copies of them in its own
    dtypes.
    """

    def __init__(
        self,
        target: FrozenTarget,
        module: DraftModule | MTPModule,
        data: PackedSequences,
        settings: TrainSettings,
    ) -> None:
        longest = int(data.lengths.max())
        supervised = data.prompt_lengths.to(data.lengths.device) + 1 < data.lengths
        refuse_unsupervised(torch.stack((supervised, supervised), -1))
        limit = min(target.cos.shape[0], module.max_positions) - module.block_size
        if longest > limit:
            raise Refused("longest sequence", longest, f"at most {limit} tokens")
        self.target, self.module, self.settings = target, module, settings
        self.order = BatchOrder(data.lengths, settings.batch_size, settings.seed)
        self.data = data.to(target.device)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.masters = [p.detach().float().clone().requires_grad_(True) for p in self.parameters]
        decayed = [m for m in self.masters if m.dim() > 1]
        kept = [m for m in self.masters if m.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": kept, "weight_decay": 0.0},
            ],
            lr=settings.peak_rate,
            betas=(0.9, 0.95),
            fused=target.device.type == "cuda",
        )
        self.step_number = 0
        self.elapsed = 0.0

    @property
    def progress(self) -> float:
        """Share of the run that is done, 0 to 1."""
        if self.settings.steps is not None:
            return self.step_number / self.settings.steps
        assert self.settings.minutes is not None
        return self.elapsed / (60 * self.settings.minutes)

    def run(
        self, log: Path | None = None, save: Path | None = None, save_every: float = 120.0
    ) -> dict[str, float]:
        """Trains to the end of the schedule.

        Args:
            log: JSON lines, one every `log_every` steps.
            save: where `checkpoint` is written every `save_every` seconds and at the end.

        Returns:
            The last logged line.

        Raises:
            Refused: a loss that is no longer finite.
        """
        begun = time.monotonic() - self.elapsed
        saved = time.monotonic()
        line: dict[str, float] = {}
        while self.progress < 1.0:
            measures = self.step()
            self.elapsed = time.monotonic() - begun
            if self.step_number % self.settings.log_every == 0 or self.progress >= 1.0:
                line = {
                    "step": self.step_number,
                    "seconds": round(self.elapsed, 1),
                    "progress": round(self.progress, 4),
                }
                line |= {name: round(float(value), 4) for name, value in measures.items()}
                if not line["loss"] == line["loss"]:
                    raise Refused(
                        "loss",
                        line["loss"],
                        "a number",
                        f"Training diverged by step {self.step_number}",
                    )
                left = self.elapsed * (1 - self.progress) / self.progress
                print(
                    "train "
                    + " ".join(f"{name} {value:g}" for name, value in line.items())
                    + f", {max(0.0, left):.0f} s left",
                    flush=True,
                )
                if log is not None:
                    with log.open("a") as file:
                        file.write(json.dumps(line) + "\n")
            if save is not None and time.monotonic() - saved > save_every:
                self.checkpoint(save)
                saved = time.monotonic()
        if save is not None:
            self.checkpoint(save)
        return line

    def step(self) -> dict[str, Tensor | float]:
        """One optimizer step; what it returns stays on the device."""
        progress = self.progress
        rate = learning_rate(progress, self.settings.warmup, self.settings.peak_rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        numbers, width = self.order.batch(self.step_number)
        index = torch.from_numpy(numbers).to(self.target.device, non_blocking=True)
        tokens, supervised = self.data.batch(index, width)
        generator = torch.Generator(device=self.target.device)
        generator.manual_seed(self.settings.seed * 1_000_000_007 + self.step_number)
        loss, measures = self.loss(
            tokens, supervised, correction_lambda(progress, self.settings.lambda_end), generator
        )
        loss.backward()
        self._update()
        self.step_number += 1
        return measures | {"rate": rate}

    def loss(
        self,
        tokens: Tensor,
        supervised: Tensor,
        lam: float,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        """The objective on one batch.

        Args:
            tokens, supervised: ``[b, T]``.
            lam: the base's share, `objective.correction_lambda`.

        Returns:
            The loss, and measures: weighted cross-entropies of base and final logits, the share of
            right first proposals, the teacher-forced accept length of whole blocks.
        """
        settings, module, target = self.settings, self.module, self.target
        domino = module.domino
        with torch.no_grad():
            hidden, features = target.forward(tokens, module.feature_layers)
            anchors = sample_anchors(supervised, settings.anchors, generator)
            shift = domino is not None and domino.shift_label
            prefix = domino.prefix_len if domino is not None else module.block_size
            labels = block_labels(
                tokens, supervised, anchors, module.block_size, shift, settings.gamma, prefix
            )
            rows = labels.token.shape[-1]
            weight = (labels.weight / labels.weight.sum().clamp(min=1e-6)).flatten()
            teacher = None
            if settings.soft > 0:
                before = (
                    (labels.position - 1).flatten(1)[..., None].expand(-1, -1, hidden.shape[-1])
                )
                teacher = hidden.gather(1, before).flatten(0, 1)
        z = module.proposal_hidden(target, tokens, hidden, features, anchors).flatten(0, 1)
        correction = out_weight = None
        if isinstance(module, DraftModule) and domino is not None:
            entered = F.embedding(
                teacher_tokens(tokens, anchors, rows).flatten(0, 1), target.embedding
            )
            correction = (
                module.correction_input(z, entered) * labels.corrected.flatten(0, 1)[..., None]
            )
            correction, out_weight = correction.flatten(0, 1), module.correction_out
        else:
            lam = 1.0
        found = draft_cross_entropy(
            z.flatten(0, 1),
            correction,
            target.lm_head,
            out_weight,
            labels.token.flatten(),
            weight * lam,
            weight * (1.0 - lam),
            teacher,
            settings.soft,
            settings.chunk,
        )
        with torch.no_grad():
            right = (found.final_choice.view(-1, rows) == labels.token.flatten(0, 1)) & (
                labels.weight > 0
            ).flatten(0, 1)
            blocks = anchors.valid.sum().clamp(min=1)
            measures: dict[str, Tensor | float] = {
                "loss": found.loss.detach(),
                "base": (weight * found.base).sum(),
                "final": (weight * found.final).sum(),
                "first": right[:, 0].sum() / blocks,
                "forced_accept": 1 + right.long().cumprod(-1).sum() / blocks,
                "lambda": lam,
            }
        return found.loss, measures

    def _update(self) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, self.settings.clip)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list[Tensor](self.parameters), self.masters)

    def checkpoint(self, path: Path) -> None:
        """Writes all that `resume` needs, whole or not at all."""
        state: dict[str, Any] = {
            "masters": [m.detach() for m in self.masters],
            "optimizer": self.optimizer.state_dict(),
            "step": self.step_number,
            "elapsed": self.elapsed,
            "settings": asdict(self.settings),
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def resume(self, path: Path) -> None:
        """Goes on where a checkpoint was written: same batches next, same point of the schedule.

        Raises:
            Refused: a checkpoint of other settings or other sizes.
        """
        state = torch.load(path, map_location=self.target.device, weights_only=True)
        ours = asdict(self.settings)
        for name, value in state["settings"].items():
            if ours.get(name) != value:
                raise Refused(f"settings.{name}", ours.get(name), f"the checkpoint's {value!r}")
        if [m.shape for m in state["masters"]] != [m.shape for m in self.masters]:
            raise Refused("checkpoint", str(path), "a checkpoint of a drafter of the same sizes")
        with torch.no_grad():
            torch._foreach_copy_(self.masters, state["masters"])
            torch._foreach_copy_(list[Tensor](self.parameters), self.masters)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step_number, self.elapsed = state["step"], state["elapsed"]
