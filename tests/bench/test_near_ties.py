"""Where answers part, and what the target says of the two tokens there."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from knockon.bench.loaded import LoadedModels, answer
from knockon.bench.near_ties import Parting, first_differences, part
from knockon.engine.config import EngineConfig
from knockon.engine.engine import Engine
from knockon.engine.sampling_params import SamplingParams
from knockon.engine.width import FixedWidth
from tests.tiny_models import TinyDrafter, TinyTarget

PROMPTS = [[5, 6, 7], list(range(40)), [9] * 11]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> LoadedModels:
    folder: Path = tmp_path_factory.mktemp("near_ties")
    target = TinyTarget().save(folder / "target")
    draft = TinyDrafter().save(folder / "draft", target)
    config = EngineConfig(
        str(target),
        draft=str(draft),
        dtype="float32",
        device="cpu",
        verify_width="auto",
        max_model_len=96,
        max_batch_size=3,
        prefix_cache=False,
    )
    return LoadedModels(config)


@pytest.fixture(scope="module")
def alone(models: LoadedModels) -> Engine:
    return models.engine(models.runner(None, (1,)), FixedWidth(1))


def test_engines_take_turns_on_one_runner(models: LoadedModels, alone: Engine) -> None:
    wanted, _ = answer(alone, PROMPTS, GREEDY, 3)
    bound = models.runner(models.drafter, (2, 8))
    engines = [models.engine(bound, FixedWidth(width)) for width in (2, 8)]
    for concurrency in (1, 2, 3):
        for engine in engines:
            ours, seconds = answer(engine, PROMPTS, GREEDY, concurrency)
            assert seconds > 0 and not first_differences(ours, wanted)
            assert part(ours, wanted, alone, alone) == []


def test_a_margin_is_the_targets_own(alone: Engine) -> None:
    wanted, _ = answer(alone, PROMPTS, GREEDY, 1)
    assert wanted[1].logprobs is not None
    at = 5
    (best, lead), (second, behind), *_ = wanted[1].logprobs[at].top.items()
    assert best == wanted[1].token_ids[at]
    changed = [*wanted[1].token_ids[:at], second, *wanted[1].token_ids[at + 1 :]]
    ours = [wanted[0], replace(wanted[1], token_ids=changed), wanted[2]]
    assert first_differences(ours, wanted) == [(1, at)]
    [found] = part(ours, wanted, alone, alone)
    assert (found.answer, found.at, found.ours, found.theirs) == (1, at, second, best)
    assert found.margin == pytest.approx(lead - behind, abs=1e-4) and found.rounding < 1e-4
    assert found.near_tie == (found.margin <= 0.25)


def test_only_what_rounding_can_do_is_a_near_tie() -> None:
    def parting(margin: float, rounding: float) -> Parting:
        return Parting(0, 3, 1, 2, margin, rounding)

    assert parting(0.2, 0.0).near_tie and parting(-0.5, 0.3).near_tie
    assert not parting(0.5, 0.1).near_tie
    assert not parting(math.inf, math.nan).near_tie and not parting(math.inf, 0.1).near_tie
