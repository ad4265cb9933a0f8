"""Widths that change from step to step change no token, on one rank or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from knockon.bench.width_trace import TracedWidth, read_trace, replay, write_trace
from knockon.engine.llm import LLM
from knockon.engine.rank_zero_width import RankZeroWidth
from knockon.engine.request import RequestOutput
from knockon.engine.sampling_params import SamplingParams
from knockon.engine.width import AdaptiveWidth, FixedWidth
from knockon.errors import Refused
from tests.engine.generation import (
    GREEDY,
    TinyShelf,
    generate,
    load,
    mean_accept_length,
    random_prompts,
    target_only,
    tokens,
)
from tests.lockstep import LockstepGroup, run_ranks

PROMPTS = random_prompts(8, seed=17, high=40)
CYCLE = (1, 4, 8, 16)


class CyclingWidth:
    """Another width every step, whatever was measured; remembers what it was told."""

    name = "auto"
    widths = CYCLE

    def __init__(self) -> None:
        self.told: list[tuple[int, int, list[int]]] = []

    def choose(self, batch: int, speculating: int) -> int:
        return CYCLE[len(self.told) % len(CYCLE)]

    def record(self, batch: int, width: int, accept_lengths: Sequence[int], seconds: float) -> None:
        assert seconds > 0
        self.told.append((batch, width, list(accept_lengths)))


def cycle_widths(llm: LLM) -> CyclingWidth:
    assert llm._engine is not None
    llm._engine.widths = policy = CyclingWidth()
    return policy


def check_told(policy: CyclingWidth, outputs: Sequence[RequestOutput]) -> None:
    assert all(
        batch == len(lengths) and all(1 <= n <= width for n in lengths)
        for batch, width, lengths in policy.told
    )
    kept = sum(chain.from_iterable(o.metrics.accept_lengths for o in outputs))
    run = sum(sum(lengths) for _, _, lengths in policy.told)
    assert kept <= run < kept + 16 * len(outputs)  # rows past a stop were run, and not kept


@pytest.mark.parametrize("drafter", ["dflash", "domino", "domino-shifted"])
@pytest.mark.parametrize("batch", [1, 8])
def test_cycling_widths_give_the_targets_greedy_tokens(
    tiny: TinyShelf, drafter: str, batch: int
) -> None:
    model, draft = tiny.target(), tiny.drafter(drafter)
    settings = {"verify_width": "auto", "max_batch_size": batch, "page_size": 4}
    with load(model, draft, **settings) as llm:
        policy = cycle_widths(llm)
        outputs = llm.generate(PROMPTS, GREEDY)
        metrics = llm.metrics()
    assert tokens(outputs) == tokens(target_only(model, PROMPTS))
    assert mean_accept_length(outputs) > 1.1
    check_told(policy, outputs)
    assert tuple(metrics.widths) == CYCLE
    assert max(metrics.widths.values()) - min(metrics.widths.values()) <= 1
    assert sum(metrics.widths.values()) == metrics.steps


def test_cycling_widths_give_the_targets_seeded_tokens(tiny: TinyShelf) -> None:
    model, draft = tiny.target(), tiny.drafter("domino")
    params = [
        SamplingParams(
            temperature=0.9,
            top_p=0.95,
            frequency_penalty=0.3,
            seed=seed,
            max_tokens=32,
            ignore_eos=True,
        )
        for seed in range(len(PROMPTS))
    ]
    with load(model, draft, verify_width="auto", max_batch_size=3) as llm:
        policy = cycle_widths(llm)
        outputs = llm.generate(PROMPTS, params)
    assert tokens(outputs) == tokens(generate(model, None, PROMPTS, params))
    assert mean_accept_length(outputs) > 1
    check_told(policy, outputs)


def test_auto_is_lossless_and_says_which_widths_it_took(tiny: TinyShelf) -> None:
    model, draft = tiny.target(), tiny.drafter("domino")
    with load(model, draft, verify_width="auto") as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        metrics = llm.metrics()
    assert tokens(outputs) == tokens(target_only(model, PROMPTS))
    assert metrics.verify_width == "auto"
    assert {1, 16} <= set(metrics.widths) <= {1, 4, 8, 12, 16}
    assert sum(metrics.widths.values()) == metrics.steps


@pytest.mark.parametrize("off", [(), (0, 2, 3)])
def test_an_engines_own_trace_replays_to_the_widths_it_took(
    tiny: TinyShelf, tmp_path: Path, off: tuple[int, ...]
) -> None:
    params = [replace(GREEDY, speculation=i not in off) for i in range(len(PROMPTS))]
    with load(tiny.target(), tiny.drafter("domino"), verify_width="auto") as llm:
        assert llm._engine is not None
        llm._engine.widths = traced = TracedWidth(llm._engine.widths)
        outputs = llm.generate(PROMPTS, params)
    widths = [step.width for step in traced.steps]
    assert {len(step.accept_lengths) for step in traced.steps} >= {len(PROMPTS) - len(off)}
    assert max(step.batch for step in traced.steps) == len(PROMPTS)
    assert tokens(outputs) == tokens(target_only(tiny.target(), PROMPTS))
    write_trace(traced.steps, tmp_path / "trace.jsonl")
    assert read_trace(tmp_path / "trace.jsonl") == traced.steps
    assert replay(traced.steps, AdaptiveWidth(traced.widths)) == widths


def test_auto_on_two_ranks_is_lossless(tiny: TinyShelf) -> None:
    model, draft = tiny.target(), tiny.drafter("domino")
    with load(model, draft, verify_width="auto", tp_size=2) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        metrics = llm.metrics()
    assert tokens(outputs) == tokens(target_only(model, PROMPTS))
    assert sum(metrics.widths.values()) == metrics.steps


def test_ranks_that_time_steps_differently_take_rank_0s_widths() -> None:
    def drive(group: LockstepGroup) -> list[int]:
        policy = RankZeroWidth(AdaptiveWidth((1, 4, 8, 12, 16)), group)
        chosen = []
        for step in range(60):
            batch = (1, 8)[step // 10 % 2]
            width = policy.choose(batch, batch)
            chosen.append(width)
            # To rank 1 rows cost nothing, to rank 0 they are dear.
            seconds = 0.01 + (0.0, 0.01)[group.rank == 0] * width * batch
            policy.record(batch, width, [min(width, 5)] * batch, seconds)
        return chosen

    first, second = run_ranks(2, drive)
    assert first == second
    assert min(first[-10:]) < 16


def test_a_fixed_width_learns_nothing(tiny: TinyShelf) -> None:
    policy = FixedWidth(8)
    policy.record(1, 8, [1], 1.0)
    assert (policy.choose(1, 1), policy.choose(64, 3), policy.name) == (8, 8, 8)


def test_auto_without_a_drafter_and_other_words_are_refused(tiny: TinyShelf) -> None:
    with pytest.raises(Refused, match="verify_width: found 'auto', wanted 1 where no draft"):
        load(tiny.target(), verify_width="auto")
    with pytest.raises(Refused, match="verify_width: found 'wide', wanted an integer or 'auto'"):
        load(tiny.target(), tiny.drafter("domino"), verify_width="wide")
    with pytest.raises(Refused, match=r"verify_width: found 8\.0, wanted an integer"):
        load(tiny.target(), tiny.drafter("domino"), verify_width=8.0)
