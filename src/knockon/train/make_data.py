"""The first stage: the target writes prompts and answers, and they are packed and kept."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from knockon.errors import Refused
from knockon.train.bulk_generate import BulkGenerator, Finished
from knockon.train.chat_format import ChatFormat, read_prompts
from knockon.train.config import TrainConfig
from knockon.train.frozen_target import FrozenTarget
from knockon.train.overlap import HeldOutPrompts
from knockon.train.prompt_source import load_prompts
from knockon.train.ranks import TrainRanks
from knockon.train.sequences import PackedSequences
from knockon.train.synthesize import KIND_WEIGHTS, Recipe, RecipeSettings

SEQUENCES = "sequences.safetensors"
FACTS = "generate.json"
_KINDS = ("file", "second", *KIND_WEIGHTS)


def make_data(
    config: TrainConfig, target: FrozenTarget, chat: ChatFormat, ranks: TrainRanks
) -> None:
    """Writes ``sequences.safetensors`` and ``generate.json``; adds to what is there.

    What was made is saved every ``save_every`` seconds, so that a kill loses little. Every rank
    answers its share of the file and writes prompts of its own.

    Raises:
        Refused: nothing was made.
    """
    work = Path(config.work)
    if ranks.first:
        gather(work)
    ranks.wait()
    whole = work / SEQUENCES
    earlier = PackedSequences.load(whole) if whole.exists() else None
    recipe, generator = _prepare(config, target, chat, ranks, earlier)
    mine = work / _part(ranks.tensors.rank)
    begun = time.monotonic()
    shown = saved = begun

    def finished(done: list[Finished]) -> None:
        nonlocal shown, saved
        recipe.finished(done)
        now = time.monotonic()
        if now - saved > config.save_every and recipe.sequences:
            saved = now
            PackedSequences.pack(recipe.sequences).save(mine)
        if now - shown > 5 and ranks.first:
            shown = now
            counts = recipe.counts
            print(
                f"generate {now - begun:.0f} s: {len(recipe.sequences)} sequences, "
                f"{counts.answer_tokens} answer tokens, "
                f"{counts.prompts_kept} of {counts.prompts_written} written prompts kept, "
                f"{int(generator.generated) / (now - begun):.0f} tokens/s",
                flush=True,
            )

    total = generator.run(recipe.next_jobs, finished, begun + 60 * config.generate_minutes)
    seconds = time.monotonic() - begun
    if recipe.sequences:
        PackedSequences.pack(recipe.sequences).save(mine)
    counted = _sums(ranks, recipe, total)
    if ranks.first:
        made = gather(work)
        if made is None:
            hint = f"{counted['held out']} prompts were dropped as held out."
            hint = hint if counted["held out"] else "Give it more minutes."
            raise Refused("sequences", 0, "at least one", hint)
        facts: dict[str, Any] = {
            "sequences": len(made),
            "answer tokens": made.answer_tokens,
            "answer tokens of this part": counted["answer tokens"],
            "prompts written by the target": counted["kept"],
            "prompts dropped as held out": counted["held out"],
            "answers by kind": {kind: counted[kind] for kind in _KINDS if counted[kind]},
            "generated tokens in all": counted["generated"],
            "generation seconds": round(seconds, 1),
            "generated tokens a second": round(counted["generated"] / seconds),
        }
        (work / FACTS).write_text(json.dumps(facts, indent=1))
        print("generate done " + json.dumps(facts), flush=True)
    ranks.wait()


def _prepare(
    config: TrainConfig,
    target: FrozenTarget,
    chat: ChatFormat,
    ranks: TrainRanks,
    earlier: PackedSequences | None,
) -> tuple[Recipe, BulkGenerator]:
    """What is asked, and who answers."""
    # Another seed for every part and every rank: they would write the same prompts again.
    seed = config.seed + (0 if earlier is None else len(earlier)) + 7919 * ranks.tensors.rank
    settings = RecipeSettings(
        max_new=config.max_new,
        sampled_temperatures=config.sampled_temperatures,
        self_written=config.self_written,
        seed=seed,
    )
    held_out = [text for path in config.workloads for text in read_prompts(Path(path))]
    prompts = load_prompts(config.prompts) if config.prompts else []
    prompts = list(dict.fromkeys(prompts))[ranks.tensors.rank :: ranks.size]
    answered = set() if earlier is None else earlier.prompts()
    recipe = Recipe(chat, prompts, settings, HeldOutPrompts(held_out), answered)
    room = max(settings.max_new, settings.max_user)
    return recipe, BulkGenerator(
        target, config.slots, settings.max_prompt, room, chat.stop_ids, seed=seed
    )


def _sums(ranks: TrainRanks, recipe: Recipe, generated: int) -> dict[str, int]:
    """Counts over all ranks."""
    counts = recipe.counts
    ours = {
        "generated": generated,
        "answer tokens": counts.answer_tokens,
        "kept": counts.prompts_kept,
        "held out": counts.prompts_held_out,
    } | {kind: counts.answers.get(kind, 0) for kind in _KINDS}
    told = torch.tensor(list(ours.values()), dtype=torch.int64)
    ranks.decisions.all_reduce(told)
    return dict(zip(ours, told.tolist(), strict=True))


def _part(rank: int) -> str:
    return f"sequences-{rank}.safetensors"


def gather(work: Path) -> PackedSequences | None:
    """The sequences of a work folder, and beside them what ranks have left there: joined to them.

    A run that was killed leaves such parts too. None where there is nothing.
    """
    whole = work / SEQUENCES
    parts = sorted(work.glob("sequences-*.safetensors"))
    found = [PackedSequences.load(path) for path in (whole, *parts) if path.exists()]
    if not found:
        return None
    made = found[0]
    for part in found[1:]:
        made = PackedSequences.join(made, part)
    if parts:
        made.save(whole)
        for path in parts:
            path.unlink()
    return made
