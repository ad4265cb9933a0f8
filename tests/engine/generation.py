"""Running engines on tiny checkpoints, and what two runs must have in common."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from knockon.engine.llm import LLM
from knockon.engine.request import RequestOutput
from knockon.engine.sampling_params import SamplingParams
from tests.reference_mtp import ReferenceMTP
from tests.reference_speculation import Reference, ReferenceDrafter, speculate_greedily
from tests.tiny_models import TinyDrafter, TinyMTP, TinyTarget

logging.getLogger("transformers").setLevel(logging.ERROR)

GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
DRAFTERS: dict[str, TinyDrafter | TinyMTP] = {
    "dflash": TinyDrafter(domino=False),
    "domino": TinyDrafter(),
    "domino-shifted": TinyDrafter(shift_label=True, layer_types="sf"),
    "mtp": TinyMTP(),
}


class TinyShelf:
    """Makes each tiny checkpoint once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[object, Path] = {}

    def target(self, recipe: TinyTarget | None = None) -> Path:
        """The folder of a target."""
        return self._make(recipe or TinyTarget())

    def drafter(
        self, recipe: TinyDrafter | TinyMTP | str, target: TinyTarget | None = None
    ) -> Path:
        """The folder of a drafter for a target; ``recipe`` may name one of ``DRAFTERS``."""
        target = target or TinyTarget()
        recipe = DRAFTERS[recipe] if isinstance(recipe, str) else recipe
        key = (recipe, target)
        if key not in self._made:
            model = self.target(target)
            self._made[key] = recipe.save(self.folder / str(len(self._made)), model)
        return self._made[key]

    def _make(self, recipe: TinyTarget) -> Path:
        if recipe not in self._made:
            self._made[recipe] = recipe.save(self.folder / str(len(self._made)))
        return self._made[recipe]


def random_prompts(count: int, seed: int = 5, low: int = 3, high: int = 60) -> list[list[int]]:
    """Prompts of random tokens and lengths, specials left out."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    return [torch.randint(0, 300, (n,), generator=generator).tolist() for n in lengths]


def load(model: Path, draft: Path | None = None, **settings: Any) -> LLM:
    """An FP32 engine."""
    return LLM(str(model), draft=str(draft) if draft else None, **{"dtype": "float32", **settings})


def generate(
    model: Path,
    draft: Path | None,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    **settings: Any,
) -> list[RequestOutput]:
    """One engine, one call."""
    with load(model, draft, **settings) as llm:
        return llm.generate([list(p) for p in prompts], params)


@cache
def _target_only(
    model: Path, prompts: tuple[tuple[int, ...], ...], params: SamplingParams
) -> list[RequestOutput]:
    return generate(model, None, prompts, params)


def target_only(
    model: Path, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY
) -> list[RequestOutput]:
    """What the target alone gives; computed once for each question."""
    return _target_only(model, tuple(tuple(p) for p in prompts), params)


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Their token ids."""
    return [output.token_ids for output in outputs]


def accept_lengths(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Their accept lengths."""
    return [output.metrics.accept_lengths for output in outputs]


def mean_accept_length(outputs: Sequence[RequestOutput]) -> float:
    """Over all verifications of all of them."""
    lengths = [length for output in outputs for length in output.metrics.accept_lengths]
    return sum(lengths) / len(lengths)


@cache
def _reference_drafter(draft: Path, model: Path) -> Reference:
    config = json.loads((draft / "config.json").read_text())
    return (ReferenceMTP if "mtp_num_hidden_layers" in config else ReferenceDrafter)(draft, model)


def check_against_reference(
    outputs: Sequence[RequestOutput], model: Path, draft: Path, width: int, pool_size: int = 0
) -> None:
    """Hold greedy outputs, and every accept length, to what the specification gives."""
    drafter = _reference_drafter(draft, model)
    for i, output in enumerate(outputs):
        expected = speculate_greedily(
            model, drafter, output.prompt_token_ids, output.token_ids, width, pool_size
        )
        assert output.metrics.accept_lengths == expected.accept_lengths, (
            f"request {i}: accept lengths differ; the closest decision had a margin of "
            f"{expected.margin:.2g}"
        )


def check_same(outputs: Sequence[RequestOutput], others: Sequence[RequestOutput]) -> None:
    """Hold two runs to the same tokens, texts, finish reasons and accept lengths."""
    for ours, theirs in zip(outputs, others, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.text == theirs.text
        assert ours.finish_reason == theirs.finish_reason
        assert ours.metrics.accept_lengths == theirs.metrics.accept_lengths


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    """The same request under another seed."""
    return replace(params, seed=seed)


def abort_and_replace(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams
) -> list[RequestOutput]:
    """Run the first two of three prompts, abort the first, add the third: the last two's ends."""
    ids = [llm.add(prompt, params) for prompt in prompts[:2]]
    for _ in range(3):
        llm.step()
    assert llm.abort(ids[0]) is not None
    third = llm.add(prompts[2], params)
    found: dict[str, RequestOutput] = {}
    while len(found) < 2:
        for output in llm.step():
            if output.finished is not None:
                found[output.request_id] = output.finished
    return [found[ids[1]], found[third]]
