"""The stages of making a drafter, each a command that leaves its result for the next.

    R="python -m knockon.train.run"; A="--target MODEL --work DIR --target-layers 1 8 --mask-id 0"
    $R generate $A --prompts prompts.jsonl --minutes 8
    $R train    $A --minutes 14
    $R evaluate $A --workloads gsm8k.jsonl humaneval.jsonl
    $R export   $A --out checkpoints/my-drafter --name my/model

A stage that was cut short goes on where it stood: ``train`` resumes from its last checkpoint, and
``all`` skips the stages whose result is there.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from knockon.drafters.config import parse_draft_config
from knockon.drafters.mtp_config import parse_mtp_config
from knockon.errors import KnockonError, Refused
from knockon.models.tokenizer import load_tokenizer
from knockon.train.bulk_generate import BulkGenerator, Finished
from knockon.train.chat_format import ChatFormat, read_prompts
from knockon.train.config import KINDS, spread_layers
from knockon.train.drafter_module import DraftModule
from knockon.train.evaluate import accept_lengths, answer_workloads, format_table
from knockon.train.export import draft_config_dict, export, model_card, mtp_config_dict
from knockon.train.frozen_target import FrozenTarget
from knockon.train.loop import Trainer, TrainSettings
from knockon.train.mtp_module import MTPModule
from knockon.train.overlap import HeldOutPrompts
from knockon.train.sequences import PackedSequences
from knockon.train.synthesize import Recipe, RecipeSettings


class Pipeline:
    """The stages over one target and one work folder.

    Args:
        args: as `parser` reads them.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.work = Path(args.work)
        self.work.mkdir(parents=True, exist_ok=True)
        gpu = torch.cuda.is_available()
        self.device = torch.device("cuda" if gpu else "cpu")
        torch.set_float32_matmul_precision("high")
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape of a mask
        self.target = FrozenTarget.load(
            Path(args.target), self.device, torch.bfloat16 if gpu else torch.float32
        )
        self.chat = ChatFormat(load_tokenizer(args.target), self.target.config.eos_token_ids)
        self.sequences = self.work / "sequences.safetensors"
        self.checkpoint = self.work / "checkpoint.pt"
        self.accept = self.work / "accept.json"

    def draft_config(self) -> dict[str, Any]:
        """The drafter's ``config.json``."""
        args = self.args
        if args.kind == "mtp":
            return mtp_config_dict(self.target.config)
        layers = args.target_layers or spread_layers(self.target.config.num_layers)
        return draft_config_dict(
            self.target.config,
            layers=args.layers,
            target_layer_ids=tuple(layers),
            mask_token_id=args.mask_id,
            block_size=args.block_size,
            gru_size=args.gru_size,
            correction_size=args.correction_size,
            domino=args.kind == "domino",
        )

    def generate(self) -> None:
        """Writes ``sequences.safetensors`` and ``generate.json``; adds to what is there.

        What was made is saved every ``save_every`` seconds, so that a kill loses little.
        """
        args = self.args
        earlier = PackedSequences.load(self.sequences) if self.sequences.exists() else None
        # Another seed for every part: it would write the same prompts again.
        seed = args.seed + (0 if earlier is None else len(earlier))
        settings = RecipeSettings(max_new=args.max_new, seed=seed, self_written=args.self_written)
        held_out = [text for path in args.workloads or () for text in read_prompts(Path(path))]
        prompts = read_prompts(Path(args.prompts)) if args.prompts else []
        answered = set() if earlier is None else earlier.prompts()
        recipe = Recipe(self.chat, prompts, settings, HeldOutPrompts(held_out), answered)
        room = max(settings.max_new, settings.max_user)
        generator = BulkGenerator(
            self.target, args.slots, settings.max_prompt, room, self.chat.stop_ids, seed=seed
        )
        begun = time.monotonic()
        shown = saved = begun

        def save() -> PackedSequences:
            made = PackedSequences.pack(recipe.sequences)
            made = made if earlier is None else PackedSequences.join(earlier, made)
            made.save(self.sequences)
            return made

        def finished(done: list[Finished]) -> None:
            nonlocal shown, saved
            recipe.finished(done)
            now = time.monotonic()
            if now - saved > args.save_every and recipe.sequences:
                saved = now
                save()
            if now - shown > 5:
                shown = now
                counts = recipe.counts
                print(
                    f"generate {now - begun:.0f} s: {len(recipe.sequences)} sequences, "
                    f"{counts.answer_tokens} answer tokens, "
                    f"{counts.prompts_kept} of {counts.prompts_written} written prompts kept, "
                    f"{int(generator.generated) / (now - begun):.0f} tokens/s",
                    flush=True,
                )

        total = generator.run(recipe.next_jobs, finished, begun + 60 * args.minutes)
        seconds = time.monotonic() - begun
        if not recipe.sequences and earlier is None:
            held = recipe.counts.prompts_held_out
            hint = f"{held} prompts were dropped as held out." if held else "Give it more minutes."
            raise Refused("sequences", 0, "at least one", hint)
        made = save()
        facts = {
            "sequences": len(made),
            "answer tokens": made.answer_tokens,
            "answer tokens of this part": recipe.counts.answer_tokens,
            "prompts written by the target": recipe.counts.prompts_kept,
            "prompts dropped as held out": recipe.counts.prompts_held_out,
            "answers by kind": recipe.counts.answers,
            "generated tokens in all": total,
            "generation seconds": round(seconds, 1),
            "generated tokens a second": round(total / seconds),
        }
        (self.work / "generate.json").write_text(json.dumps(facts, indent=1))
        print("generate done " + json.dumps(facts), flush=True)

    def build(self) -> DraftModule | MTPModule:
        """A module with its starting weights."""
        dtype, config = self.target.dtype, self.draft_config()
        module: DraftModule | MTPModule
        if self.args.kind == "mtp":
            module = MTPModule(parse_mtp_config(config), self.args.mtp_steps, dtype)
        else:
            module = DraftModule(parse_draft_config(config), dtype)
        module.initialise(self.args.seed, self.target if self.args.start == "target" else None)
        return module.to(self.device)

    def trainer(self, module: DraftModule | MTPModule, data: PackedSequences) -> Trainer:
        """With the settings of the command line."""
        args = self.args
        settings = TrainSettings(
            steps=args.steps,
            minutes=None if args.steps else args.minutes,
            batch_size=args.batch_size,
            anchors=args.anchors,
            peak_rate=args.rate,
            gamma=args.gamma,
            lambda_end=args.lambda_end,
            soft=args.soft,
            chunk=args.chunk,
            log_every=args.log_every,
            seed=args.seed,
        )
        return Trainer(self.target, module, data, settings)

    def train(self) -> None:
        """Writes ``checkpoint.pt``, ``train.jsonl`` and ``train.json``."""
        module = self.build()
        trainer = self.trainer(module, PackedSequences.load(self.sequences))
        log = self.work / "train.jsonl"
        keep_lines(log, self.checkpoint.exists(), trainer, self.checkpoint)
        if trainer.step_number:
            print(
                f"train resumes at step {trainer.step_number}, {trainer.elapsed:.0f} s", flush=True
            )
        if self.args.compile:
            module.compile_backbone()
        last = trainer.run(log, self.checkpoint, self.args.save_every)
        facts = {
            "training steps": trainer.step_number,
            "training seconds": round(trainer.elapsed, 1),
            "sequences a step": self.args.batch_size,
            "blocks a sequence": self.args.anchors,
            "epochs": round(trainer.step_number / trainer.order.batches_per_epoch, 2),
            "peak rate": self.args.rate,
            "gamma": self.args.gamma,
            "lambda ends at": self.args.lambda_end,
            "share of the target's distribution in the labels": self.args.soft,
            "started from": "the target's last layers"
            if self.args.start == "target"
            else "random weights",
        }
        (self.work / "train.json").write_text(json.dumps(facts | {"last": last}, indent=1))

    def trained(self) -> DraftModule | MTPModule:
        """The module of the checkpoint.

        Raises:
            Refused: where there is none.
        """
        if not self.checkpoint.exists():
            raise Refused("checkpoint", None, f"{self.checkpoint}: run the stage train first")
        module = self.build()
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        with torch.no_grad():
            for parameter, master in zip(module.parameters(), state["masters"], strict=True):
                parameter.copy_(master)
        return module

    def evaluate(self) -> None:
        """Writes ``accept.json``: accept lengths by workload and verify width."""
        if not self.args.workloads:
            raise Refused("workloads", None, "at least one file of held-out prompts")
        begun = time.monotonic()
        workloads = [Path(path) for path in self.args.workloads]
        held_out = answer_workloads(self.target, self.chat, workloads, self.args.limit)
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
            self.args.name,
            self.args.license,
            config,
            facts("generate.json"),
            training,
            format_table(table) if table else "not measured",
        )
        out = Path(self.args.out)
        export(self.trained(), config, out, card)
        print(f"export: {sorted(path.name for path in out.iterdir())}", flush=True)

    def all(self) -> None:
        """Every stage, skipping what is done."""
        minutes = self.args.minutes
        if not (self.work / "generate.json").exists():
            self.args.minutes = self.args.generate_minutes
            self.generate()
            torch.cuda.empty_cache()
        self.args.minutes = minutes
        if not (self.work / "train.json").exists():
            self.train()
        if self.args.workloads:
            self.evaluate()
        self.export()


def keep_lines(log: Path, resuming: bool, trainer: Trainer, checkpoint: Path) -> None:
    """Take up a run where its checkpoint stands: what was logged past it will be logged again."""
    if resuming:
        trainer.resume(checkpoint)
    if log.exists():
        lines = log.read_text().splitlines()
        # A kill may have cut the last line short; it was past the checkpoint then.
        kept = [line for line in lines if line.endswith("}")]
        kept = [line for line in kept if json.loads(line)["step"] <= trainer.step_number]
        log.write_text("".join(line + "\n" for line in kept))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m knockon.train.run", description=__doc__.splitlines()[0]
    )
    add = found.add_argument
    add("stage", choices=("generate", "train", "evaluate", "export", "all"))
    add("--target", required=True, help="Hugging Face folder or GGUF file")
    add("--work", required=True, help="folder that the stages share")
    add("--minutes", type=float, default=10.0, help="of the stage; with all: of training")
    add("--generate-minutes", type=float, default=8.0, help="of generation, with all")
    add("--steps", type=int, help="train for so many steps instead of by the clock")
    add(
        "--prompts",
        type=Path,
        help='JSON lines of {"turns": [...]} to answer besides self-written prompts',
    )
    add("--no-self-written", dest="self_written", action="store_false")
    add("--slots", type=int, default=2048, help="sequences generated at once")
    add("--max-new", type=int, default=192, help="cap on a training answer")
    add("--seed", type=int, default=0)
    add("--layers", type=int, default=4, help="draft layers")
    add(
        "--target-layers",
        type=int,
        nargs="+",
        help="target layers whose outputs a block drafter reads; five, spread evenly",
    )
    add("--mask-id", type=int, help="token that stands for a masked position of a block")
    add("--block-size", type=int, default=16)
    add("--gru-size", type=int, default=256)
    add("--correction-size", type=int, default=64)
    add("--kind", choices=KINDS, default="domino")
    add("--mtp-steps", type=int, default=7, help="proposals that an MTP head is unrolled for")
    add(
        "--start",
        choices=("target", "random"),
        default="target",
        help="starting weights of the draft layers",
    )
    add("--batch-size", type=int, default=64)
    add("--anchors", type=int, default=24, help="blocks a sequence")
    add("--rate", type=float, default=1e-3)
    add("--gamma", type=float, default=7.0)
    add("--lambda-end", type=float, default=0.3)
    add("--soft", type=float, default=0.5)
    add("--chunk", type=int, default=8192, help="rows whose logits live at once")
    add("--log-every", type=int, default=50, help="steps between two lines of the log")
    add("--save-every", type=float, default=120.0, help="seconds between two checkpoints")
    add("--compile", action="store_true", help="let Inductor fuse the backbone")
    add("--workloads", type=Path, nargs="*", help="JSON-lines files of held-out prompts")
    add("--limit", type=int, default=128, help="prompts of each workload")
    add("--out", help="folder for the exported drafter")
    add("--name", default="the target", help="the target's name, for the model card")
    add("--license", default="apache-2.0", help="the target's licence, for the model card")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Runs one stage; exit code 2 and one line on a refusal."""
    args = parser().parse_args(arguments)
    try:
        if args.kind != "mtp" and args.mask_id is None:
            raise Refused("--mask-id", None, "a token id that no text of the target holds")
        if args.stage in ("export", "all") and not args.out:
            raise Refused("--out", None, "a folder to export to")
        getattr(Pipeline(args), args.stage)()
    except KnockonError as error:
        print(f"error: {error}", flush=True)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
