"""Every stage of making SmolLM2's drafter for some seconds at real sizes: where the time goes.

    PYTHONPATH=src python3 benchmarks/train_smollm2.py WORK --prompts prompts.jsonl \\
        --workloads workloads/*.jsonl

The settings are those of ``benchmarks/drafters/smollm2_KIND.yaml``. Results go to WORK/smoke.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch

from knockon.train.bulk_generate import BulkGenerator, Finished
from knockon.train.chat_format import read_prompts
from knockon.train.config import KINDS, read_train_config
from knockon.train.evaluate import accept_lengths, answer_workloads, format_table
from knockon.train.run import Pipeline
from knockon.train.sequences import PackedSequences
from knockon.train.synthesize import Recipe, RecipeSettings


class Smoke:
    """Every stage at real sizes for a few seconds, with a timing breakdown.

    Args:
        args: of the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        file = Path(__file__).parent / "drafters" / f"smollm2_{args.kind}.yaml"
        config = dataclasses.replace(
            read_train_config(file),
            target=args.target,
            work=str(args.work),
            out=str(args.work / "drafter"),
            steps=400,
        )
        self.pipeline = Pipeline(config)
        self.args, self.seconds, self.max_new = args, args.seconds, config.max_new
        self.results: dict[str, Any] = {}
        self.begun = time.monotonic()

    def note(self, name: str, value: Any) -> None:
        self.results[name] = value
        print(f"[{time.monotonic() - self.begun:6.1f} s] {name}: {json.dumps(value)}", flush=True)
        (self.pipeline.work / "smoke.json").write_text(json.dumps(self.results, indent=1))

    def synchronize(self) -> None:
        if self.pipeline.ranks.device.type == "cuda":
            torch.cuda.synchronize()

    def peak(self) -> float:
        """GiB at most since the last call."""
        if self.pipeline.ranks.device.type != "cuda":
            return 0.0
        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
        return round(peak, 2)

    def generation(self, slots: int) -> Recipe:
        """Tokens a second of the data recipe with so many slots, and one decode step alone."""
        pipeline, args = self.pipeline, self.args
        settings = RecipeSettings(max_new=self.max_new, max_user=min(160, self.max_new))
        recipe = Recipe(pipeline.chat, read_prompts(args.prompts) if args.prompts else [], settings)
        generator = BulkGenerator(
            pipeline.target, slots, settings.max_prompt, self.max_new, pipeline.chat.stop_ids
        )
        with torch.inference_mode():
            generator._step()
            self.synchronize()
            generator.lengths.fill_(200)
            generator.active.fill_(True)
            generator.limits.fill_(1 << 40)
            begun = time.monotonic()
            for _ in range(10):
                generator._step()
            self.synchronize()
            alone = (time.monotonic() - begun) / 10
            for tensor in (
                generator.generated,
                generator.lengths,
                generator.active,
                generator.counts,
            ):
                tensor.zero_()
        begun = time.monotonic()
        host = 0.0

        def finished(done: list[Finished]) -> None:
            nonlocal host
            at = time.monotonic()
            recipe.finished(done)
            host += time.monotonic() - at

        total = generator.run(recipe.next_jobs, finished, begun + self.seconds)
        seconds = time.monotonic() - begun
        self.note(
            f"generation, {slots} slots",
            {
                "tokens_per_s": round(total / seconds),
                "step_ms_at_context_200": round(1e3 * alone, 3),
                "host_share": round(host / seconds, 3),
                "sequences": len(recipe.sequences),
                "kept": f"{recipe.counts.prompts_kept}/{recipe.counts.prompts_written}",
                "peak_gib": self.peak(),
            },
        )
        for prompt, answer in recipe.sequences[:3]:
            print(repr(pipeline.chat.tokenizer.decode([*prompt, *answer]))[:400], flush=True)
        self.agreement(recipe)
        return recipe

    @torch.inference_mode()
    def agreement(self, recipe: Recipe) -> None:
        """Share of generated tokens that the dense forward would choose too: near 1."""
        target = self.pipeline.target
        same = total = 0
        # The file's first answers and those to self-written prompts are greedy; sampled ones come
        # after.
        for prompt, answer in recipe.sequences[:64]:
            tokens = torch.tensor([*prompt, *answer], device=target.device)[None]
            hidden, _ = target.forward(tokens)
            wanted = (hidden[0, len(prompt) - 1 : -1] @ target.lm_head.T).argmax(-1)
            same += int((wanted == tokens[0, len(prompt) :]).sum())
            total += len(answer)
        self.note("greedy agreement with the dense forward", round(same / max(1, total), 4))

    def training(
        self, data: PackedSequences, batch_size: int, anchors: int, compiled: bool, **changes: Any
    ) -> None:
        """Milliseconds a step, by part."""
        saved, compare = self.pipeline.config, self.args.smoke_steps
        self.pipeline.config = dataclasses.replace(
            saved, batch_size=batch_size, anchors=anchors, **changes
        )
        module = self.pipeline.build()
        trainer = self.pipeline.trainer(module, data)
        begun = time.monotonic()
        if compiled:
            module.compile_backbone()
        for _ in range(3):
            trainer.step()
        self.synchronize()
        warm = time.monotonic() - begun
        begun, steps, rows = time.monotonic(), 0, 0
        while time.monotonic() - begun < self.seconds or trainer.step_number < compare:
            rows += self.tokens_of(trainer, trainer.step_number)
            measures = trainer.step()
            steps += 1
            if trainer.step_number == compare:
                then = {name: round(float(value), 3) for name, value in measures.items()}
            if steps % 8 == 0:
                self.synchronize()
        self.synchronize()
        step = (time.monotonic() - begun) / steps
        parts = self.parts(trainer)
        self.note(
            f"training, {batch_size} x {anchors}"
            + (", compiled" if compiled else "")
            + (f" {changes}" if changes else ""),
            {
                "step_ms": round(1e3 * step, 2),
                "warm_up_s": round(warm, 1),
                "context_tokens_a_step": round(rows / steps),
                "parts_ms": parts,
                "peak_gib": self.peak(),
                "steps": steps,
                f"at_step_{compare}": then,
            },
        )
        self.module = module
        self.trainer = trainer
        self.pipeline.config = saved

    @staticmethod
    def tokens_of(trainer: Any, number: int) -> int:
        numbers, width = trainer.order.batch(number)
        return len(numbers) * width

    def parts(self, trainer: Any) -> dict[str, float]:
        """Each part of one step alone, the median of three."""
        found: dict[str, list[float]] = {"target": [], "forward": [], "backward": [], "update": []}
        for _ in range(3):
            numbers, width = trainer.order.batch(trainer.step_number)
            tokens, supervised = trainer.data.batch(
                torch.from_numpy(numbers).to(self.pipeline.ranks.device), width
            )
            marks: list[float] = []

            def mark(marks: list[float] = marks) -> None:
                self.synchronize()
                marks.append(time.monotonic())

            mark()
            with torch.no_grad():
                self.pipeline.target.forward(tokens, trainer.module.feature_layers)
            mark()
            loss, _ = trainer.loss(tokens, supervised, 0.5)
            mark()
            loss.backward()
            mark()
            trainer.masters.update(0.0)
            mark()
            for name, a, b in zip(found, marks, marks[1:], strict=False):
                found[name].append(1e3 * (b - a))
            trainer.step_number += 1
        return {name: round(sorted(times)[1], 2) for name, times in found.items()}

    def profile(self) -> None:
        """The kernels that take most of a training step's device time."""
        if self.pipeline.ranks.device.type != "cuda":
            return
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(3):
                self.trainer.step()
            self.synchronize()
        events = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
        for event in events[:22]:
            each = event.self_device_time_total / 3e3
            print(f"{each:8.2f} ms {event.count / 3:6.0f} x {event.key[:90]}", flush=True)

    def run(self) -> None:
        args = self.args
        recipe = None
        for slots in args.smoke_slots:
            recipe = self.generation(slots)
            if self.pipeline.ranks.device.type == "cuda":
                torch.cuda.empty_cache()
        assert recipe is not None
        data = PackedSequences.pack(recipe.sequences)
        self.note(
            "sequence lengths",
            {
                "mean": float(data.lengths.float().mean()),
                "max": int(data.lengths.max()),
                "prompt": float(data.prompt_lengths.float().mean()),
            },
        )
        for batch_size, anchors in args.smoke_batches:
            self.training(data, batch_size, anchors, compiled=False)
        self.profile()
        batch_size, anchors = args.smoke_batches[0]
        self.training(data, batch_size, anchors, compiled=False, optimizer="muon")
        begun = time.monotonic()
        held_out = answer_workloads(
            self.pipeline.target,
            self.pipeline.chat,
            args.workloads,
            args.limit,
            128,
        )
        answered = time.monotonic()
        table = accept_lengths(self.module, self.pipeline.target, held_out)
        self.note(
            "evaluation",
            {
                "answers_s": round(answered - begun, 1),
                "replay_s": round(time.monotonic() - answered, 1),
                "peak_gib": self.peak(),
            },
        )
        print(format_table(table))
        self.trainer.checkpoint(self.pipeline.checkpoint)
        self.pipeline.export()
        self.pipeline.checkpoint.unlink()
        if args.compile:
            self.training(data, batch_size, anchors, compiled=True)
            self.profile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("work", type=Path)
    add("--target", default="smollm2-135m")
    add("--kind", choices=KINDS, default="domino")
    add("--prompts", type=Path, help="JSON lines to answer besides self-written prompts")
    add("--workloads", type=Path, nargs="+", required=True, help="held-out JSON-lines files")
    add("--limit", type=int, default=32, help="prompts of each workload")
    add("--seconds", type=float, default=8.0, help="of each timed part")
    add("--smoke-steps", type=int, default=100, help="losses are compared here")
    add("--smoke-slots", type=int, nargs="+", default=[4096])
    add(
        "--smoke-batches",
        nargs="+",
        default=[(64, 24)],
        type=lambda text: tuple(map(int, text.split("x"))),
        help="batch size x anchors",
    )
    add("--compile", action="store_true", help="compare with a compiled backbone too")
    Smoke(parser.parse_intermixed_args()).run()


if __name__ == "__main__":
    main()
