"""The stages of making a drafter, each of which leaves its result for the next.

A stage that was cut short goes on where it stood: ``generate`` adds what is missing, ``train``
resumes from its last checkpoint, and ``all`` skips the stages whose result is there.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch

from knockon.drafters.config import parse_draft_config
from knockon.drafters.mtp_config import parse_mtp_config
from knockon.errors import Refused
from knockon.models.catalog import resolve
from knockon.models.tokenizer import load_tokenizer
from knockon.train.chat_format import ChatFormat
from knockon.train.config import TrainConfig, spread_layers
from knockon.train.curve import plot_curve, read_curve
from knockon.train.drafter_module import DraftModule
from knockon.train.evaluate import HeldOut, accept_lengths, answer_workloads, format_table
from knockon.train.export import draft_config_dict, export, model_card, mtp_config_dict
from knockon.train.frozen_target import FrozenTarget
from knockon.train.loop import Trainer
from knockon.train.make_data import FACTS, SEQUENCES, gather, make_data
from knockon.train.mtp_module import MTPModule
from knockon.train.progress import keep_lines
from knockon.train.ranks import TrainRanks
from knockon.train.sequences import PackedSequences
from knockon.train.settings import TrainSettings
from knockon.train.warm_start import start_from

# At most this part of the sequences is held out of training.
_HELD_OUT_SHARE = 0.05


class Pipeline:
    """The stages over one target and one work folder.

    Args:
        config: what is to be made.
        ranks: that make it together; one by default.
    """

    def __init__(self, config: TrainConfig, ranks: TrainRanks | None = None) -> None:
        gpu = torch.cuda.is_available()
        self.config = config
        self.ranks = ranks or TrainRanks(device=torch.device("cuda" if gpu else "cpu"))
        self.work = Path(config.work)
        self.work.mkdir(parents=True, exist_ok=True)
        torch.set_float32_matmul_precision("high")
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape of a mask
        path = resolve(config.target)
        self.target = FrozenTarget.load(
            path, self.ranks.device, torch.bfloat16 if gpu else torch.float32
        )
        self.chat = ChatFormat(load_tokenizer(path), self.target.config.eos_token_ids)
        self.sequences = self.work / SEQUENCES
        self.checkpoint = self.work / "checkpoint.pt"
        self.accept = self.work / "accept.json"
        self.log = self.work / "train.jsonl"

    def draft_config(self) -> dict[str, Any]:
        """The drafter's ``config.json``."""
        config = self.config
        if config.kind == "mtp":
            return mtp_config_dict(self.target.config)
        layers = config.target_layers or spread_layers(self.target.config.num_layers)
        assert config.mask_id is not None
        return draft_config_dict(
            self.target.config,
            layers=config.layers,
            target_layer_ids=tuple(layers),
            mask_token_id=config.mask_id,
            block_size=config.block_size,
            gru_size=config.gru_size,
            correction_size=config.correction_size,
            domino=config.kind == "domino",
        )

    def generate(self) -> None:
        """See :func:`~knockon.train.make_data.make_data`."""
        make_data(self.config, self.target, self.chat, self.ranks)
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()

    def build(self) -> DraftModule | MTPModule:
        """A module with its starting weights."""
        dtype, config = self.target.dtype, self.draft_config()
        module: DraftModule | MTPModule
        if self.config.kind == "mtp":
            module = MTPModule(parse_mtp_config(config), self.config.mtp_steps, dtype)
        else:
            module = DraftModule(parse_draft_config(config), dtype)
        start = self.config.start
        module.initialise(self.config.seed, self.target if start == "target" else None)
        if start not in ("random", "target"):
            start_from(module, resolve(start, "start"), self.target.config)
        return module.to(self.ranks.device)

    def trainer(
        self,
        module: DraftModule | MTPModule,
        data: PackedSequences,
        held_out: HeldOut | None = None,
    ) -> Trainer:
        """With the configured settings."""
        config = self.config
        same = {field.name for field in dataclasses.fields(TrainSettings)}
        same &= {field.name for field in dataclasses.fields(TrainConfig)}
        chosen: dict[str, Any] = {name: getattr(config, name) for name in same}
        chosen |= {"peak_rate": config.rate, "minutes": None if config.steps else config.minutes}
        settings = TrainSettings(**chosen)
        return Trainer(self.target, module, data, settings, held_out, self.ranks)

    def data(self) -> tuple[PackedSequences, HeldOut | None]:
        """What is trained on, and what is held out of it to be replayed.

        Raises:
            Refused: where nothing has been generated.
        """
        if self.ranks.first:
            gather(self.work)
        self.ranks.wait()
        if not self.sequences.exists():
            raise Refused("sequences", None, f"{self.sequences}: run the stage generate first")
        data = PackedSequences.load(self.sequences)
        count = min(self.config.held_out, int(len(data) * _HELD_OUT_SHARE))
        if not count:
            return data, None
        rest, held_out = data.hold_out(count, self.config.seed)
        return rest, HeldOut("held out", held_out.pairs())

    def train(self) -> None:
        """Writes ``checkpoint.pt``, ``train.jsonl`` and ``train.json``."""
        module = self.build()
        trainer = self.trainer(module, *self.data())
        if self.checkpoint.exists():
            trainer.resume(self.checkpoint)
        if self.ranks.first:
            keep_lines(self.log, trainer.step_number)
            if trainer.step_number:
                at = f"step {trainer.step_number}, {trainer.elapsed:.0f} s"
                print(f"train resumes at {at}", flush=True)
        if self.config.compile:
            module.compile_backbone()
        last = trainer.run(self.log, self.checkpoint, self.config.save_every)
        if self.ranks.first:
            facts = self._training_facts(trainer) | {"last": last}
            (self.work / "train.json").write_text(json.dumps(facts, indent=1))
        self.ranks.wait()

    def _training_facts(self, trainer: Trainer) -> dict[str, Any]:
        """What the model card says of a run."""
        config = self.config
        started = {"random": "random weights", "target": "the target's last layers"}
        return {
            "training steps": trainer.step_number,
            "training seconds": round(trainer.elapsed, 1),
            "ranks": self.ranks.size,
            "sequences a step": config.batch_size,
            "blocks a sequence": config.anchors,
            "epochs": round(trainer.step_number / trainer.order.batches_per_epoch, 2),
            "optimizer": config.optimizer,
            "peak rate": config.rate,
            "gamma": config.gamma,
            "lambda": f"from {config.lambda_start} to {config.lambda_end}",
            "share of the target's distribution in the labels": config.soft,
            "started from": started.get(config.start, config.start),
        }

    def plot(self) -> None:
        """Draws ``train.jsonl`` as ``curve.png``."""
        out = self.work / "curve.png"
        plot_curve(read_curve(self.log), out)
        print(f"plot: {out}", flush=True)

    def trained(self) -> DraftModule | MTPModule:
        """The module of the checkpoint.

        Raises:
            Refused: where there is none.
        """
        if not self.checkpoint.exists():
            raise Refused("checkpoint", None, f"{self.checkpoint}: run the stage train first")
        module = self.build()
        state = torch.load(self.checkpoint, map_location=self.ranks.device, weights_only=True)
        with torch.no_grad():
            for parameter, master in zip(module.parameters(), state["masters"], strict=True):
                parameter.copy_(master)
        return module

    def evaluate(self) -> None:
        """Writes ``accept.json``: accept lengths by workload and verify width."""
        if not self.config.workloads:
            raise Refused("workloads", None, "at least one file of held-out prompts")
        begun = time.monotonic()
        workloads = [Path(path) for path in self.config.workloads]
        held_out = answer_workloads(self.target, self.chat, workloads, self.config.limit, 256)
        answered = time.monotonic()
        module = self.trained()
        widths = tuple(w for w in (16, 8, 4) if w <= module.block_size) or (module.block_size,)
        table = accept_lengths(module, self.target, held_out, widths)
        self.accept.write_text(json.dumps(table, indent=1))
        print(format_table(table))
        print(
            f"evaluate: answers {answered - begun:.1f} s, "
            f"replay {time.monotonic() - answered:.1f} s",
            flush=True,
        )

    def export(self) -> None:
        """Writes the published folder."""

        def facts(name: str) -> dict[str, Any]:
            path = self.work / name
            return json.loads(path.read_text()) if path.exists() else {}

        table = facts("accept.json")
        config = self.draft_config()
        training = {name: value for name, value in facts("train.json").items() if name != "last"}
        card = model_card(
            self.config.name or self.config.target,
            self.config.license,
            config,
            facts(FACTS),
            training,
            format_table(table) if table else "not measured",
        )
        if self.config.out is None:
            raise Refused("out", None, "a folder to export to")
        out = Path(self.config.out)
        export(self.trained(), config, out, card)
        print(f"export: {sorted(path.name for path in out.iterdir())}", flush=True)

    def all(self) -> None:
        """Every stage, skipping what is done."""
        if not (self.work / FACTS).exists():
            self.generate()
        if not (self.work / "train.json").exists():
            self.train()
        if not self.ranks.first:
            return
        if self.config.workloads:
            self.evaluate()
        self.export()
