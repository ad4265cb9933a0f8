"""The training loop: features on the fly, annealed by the clock or by a number of steps."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from knockon.errors import Refused
from knockon.train.cross_entropy import draft_cross_entropy
from knockon.train.drafter_module import DraftModule
from knockon.train.evaluate import HeldOut, accept_lengths
from knockon.train.frozen_target import FrozenTarget
from knockon.train.masters import MasterWeights
from knockon.train.mtp_module import MTPModule
from knockon.train.objective import (
    Anchors,
    Labels,
    block_labels,
    correction_lambda,
    learning_rate,
    refuse_unsupervised,
    sample_anchors,
    teacher_tokens,
)
from knockon.train.progress import ProgressLog
from knockon.train.ranks import TrainRanks
from knockon.train.sequences import BatchOrder, PackedSequences
from knockon.train.settings import TrainSettings


class Trainer:
    """State of one run: weights, optimizer, how far it has come.

    Args:
        held_out: sequences that are replayed now and then; not among the data.
        ranks: that share every batch.
    """

    def __init__(
        self,
        target: FrozenTarget,
        module: DraftModule | MTPModule,
        data: PackedSequences,
        settings: TrainSettings,
        held_out: HeldOut | None = None,
        ranks: TrainRanks | None = None,
    ) -> None:
        longest = int(data.lengths.max())
        supervised = data.prompt_lengths.to(data.lengths.device) + 1 < data.lengths
        refuse_unsupervised(torch.stack((supervised, supervised), -1))
        limit = min(target.cos.shape[0], module.max_positions) - module.block_size
        if longest > limit:
            raise Refused("longest sequence", longest, f"at most {limit} tokens")
        self.target, self.module, self.settings = target, module, settings
        self.held_out = held_out
        self.ranks = TrainRanks(device=target.device) if ranks is None else ranks
        self.ranks.share(settings.batch_size)
        self.order = BatchOrder(data.lengths, settings.batch_size, settings.seed)
        self.data = data.to(target.device)
        self.masters = MasterWeights(module, settings, self.ranks)
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
        progress = ProgressLog(log, self.elapsed, told=self.ranks.first)
        settings = self.settings
        while self.progress < 1.0:
            tokens = self.order.tokens(self.step_number)
            measures = self.step()
            self.elapsed = self.ranks.agree(time.monotonic() - begun)
            progress.count(tokens)
            ended = self.progress >= 1.0
            replayed = self.step_number % settings.held_out_every == 0 or ended
            if self.step_number % settings.log_every == 0 or replayed:
                found = self._measured(measures)
                if replayed and self.held_out is not None and self.ranks.first:
                    found["held_out_accept"] = self._held_out_accept(self.held_out)
                progress.tell(self.step_number, self.elapsed, self.progress, found)
            if save is not None and time.monotonic() - saved > save_every:
                self.checkpoint(save)
                saved = time.monotonic()
        if save is not None:
            self.checkpoint(save)
        return progress.last

    def _measured(self, measures: dict[str, Tensor | float]) -> dict[str, float]:
        """Of all ranks together."""
        partial = {name: x for name, x in measures.items() if isinstance(x, Tensor)}
        sums = torch.stack(self.ranks.add(list(partial.values()))).tolist()
        found = {name: float(x) for name, x in measures.items() if not isinstance(x, Tensor)}
        found = dict(zip(partial, sums, strict=True)) | found
        if found["loss"] != found["loss"]:
            hint = f"Training diverged by step {self.step_number}"
            raise Refused("loss", found["loss"], "a number", hint)
        return found

    def _held_out_accept(self, held_out: HeldOut) -> float:
        """Accept length on sequences that are not trained on, chained as in serving."""
        width = self.module.block_size
        return accept_lengths(self.module, self.target, [held_out], (width,))["mean"][str(width)]

    def step(self) -> dict[str, Tensor | float]:
        """One optimizer step; what it returns stays on the device: this rank's part of each sum."""
        settings, progress = self.settings, self.progress
        numbers, width = self.order.batch(self.step_number)
        index = torch.from_numpy(numbers).to(self.target.device, non_blocking=True)
        tokens, supervised = self.data.batch(index, width)
        generator = torch.Generator(device=self.target.device)
        generator.manual_seed(settings.seed * 1_000_000_007 + self.step_number)
        lam = correction_lambda(progress, settings.lambda_end, start=settings.lambda_start)
        loss, measures = self.loss(tokens, supervised, lam, generator)
        loss.backward()
        rate = learning_rate(progress, settings.warmup, settings.peak_rate)
        self.masters.update(rate)
        self.step_number += 1
        return measures | {"rate": rate}

    def loss(
        self,
        tokens: Tensor,
        supervised: Tensor,
        lam: float,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        """The objective on one batch, or this rank's part of it: what the parts give is added up.

        Every rank draws the anchors of the whole batch, so that they and the sum of weights that
        all is divided by are one rank's.

        Args:
            tokens, supervised: ``[b, T]``, of all ranks together.
            lam: the base's share, `objective.correction_lambda`.

        Returns:
            The loss, and measures: weighted cross-entropies of base and final logits, the share of
            right first proposals, the teacher-forced accept length of whole blocks.
        """
        settings, module, target = self.settings, self.module, self.target
        domino = module.domino
        with torch.no_grad():
            anchors = sample_anchors(supervised, settings.anchors, generator)
            shift = domino is not None and domino.shift_label
            prefix = domino.prefix_len if domino is not None else module.block_size
            labels = block_labels(
                tokens, supervised, anchors, module.block_size, shift, settings.gamma, prefix
            )
            total, blocks = labels.weight.sum().clamp(min=1e-6), anchors.valid.sum().clamp(min=1)
            mine = self.ranks.share(len(tokens))
            tokens, anchors = tokens[mine], Anchors(*(part[mine] for part in anchors))
            labels = Labels(*(part[mine] for part in labels))
            hidden, features = target.forward(tokens, module.feature_layers)
            rows = labels.token.shape[-1]
            weight = (labels.weight / total).flatten()
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
            gained = anchors.valid.sum() + right.long().cumprod(-1).sum()
            measures: dict[str, Tensor | float] = {
                "loss": found.loss.detach(),
                "base": (weight * found.base).sum(),
                "final": (weight * found.final).sum(),
                "first": right[:, 0].sum() / blocks,
                "forced_accept": gained / blocks,
                "lambda": lam,
            }
        return found.loss, measures

    def checkpoint(self, path: Path) -> None:
        """Writes all that `resume` needs, whole or not at all; the first rank does."""
        if not self.ranks.first:
            return
        state: dict[str, Any] = self.masters.state() | {
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
        if [m.shape for m in state["masters"]] != [m.shape for m in self.masters.tensors]:
            raise Refused("checkpoint", str(path), "a checkpoint of a drafter of the same sizes")
        self.masters.load(state)
        self.step_number, self.elapsed = state["step"], state["elapsed"]
