"""A request with speculation off gets a token a step, the target's; the others keep theirs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from knockon.engine.sampling_params import SamplingParams
from knockon.errors import Refused
from tests.engine.generation import (
    GREEDY,
    TinyShelf,
    accept_lengths,
    check_same,
    generate,
    load,
    mean_accept_length,
    random_prompts,
    target_only,
    tokens,
)
from tests.engine.test_width_lossless import cycle_widths

PROMPTS = random_prompts(6, seed=29, high=30)
OFF = (0, 2, 3)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24, ignore_eos=True)


def requests(sampled: bool) -> list[SamplingParams]:
    """Of different lengths; the last to go have speculation off."""
    params = [replace(SAMPLED, seed=i) if sampled else GREEDY for i in range(len(PROMPTS))]
    return [replace(p, max_tokens=40 if i in OFF else 12 + 3 * i) for i, p in enumerate(params)]


def some_off(params: list[SamplingParams]) -> list[SamplingParams]:
    return [replace(p, speculation=i not in OFF) for i, p in enumerate(params)]


@pytest.mark.parametrize("in_flight", [False, True], ids=["to its end", "in flight"])
@pytest.mark.parametrize(
    ("drafter", "sampled"), [("domino", False), ("domino", True), ("mtp", False), ("mtp", True)]
)
def test_in_a_batch_with_others(
    tiny: TinyShelf, drafter: str, sampled: bool, in_flight: bool
) -> None:
    model, draft, params = tiny.target(), tiny.drafter(drafter), requests(sampled)
    settings: dict[str, Any] = {"verify_width": 4, "overlap_schedule": in_flight}
    on = generate(model, draft, PROMPTS, params, **settings)
    with load(model, draft, max_batch_size=4, **settings) as llm:
        mixed = llm.generate(PROMPTS, some_off(params))
        metrics = llm.metrics()
    assert tokens(mixed) == tokens(on) == tokens(generate(model, None, PROMPTS, params))
    for i, output in enumerate(mixed):
        if i in OFF:
            assert output.metrics.accept_lengths == [1] * (len(output.token_ids) - 1)
    speculating = [output for i, output in enumerate(mixed) if i not in OFF]
    check_same(speculating, [output for i, output in enumerate(on) if i not in OFF])
    assert mean_accept_length(speculating) > 1.05
    assert metrics.accept_lengths == Counter(chain.from_iterable(accept_lengths(speculating)))
    assert set(metrics.widths) == {1, 4}  # 1 once nobody left speculates


@pytest.mark.parametrize("in_flight", [False, True], ids=["to its end", "in flight"])
def test_steps_in_which_nobody_speculates_verify_one_position(
    tiny: TinyShelf, in_flight: bool
) -> None:
    model, draft = tiny.target(), tiny.drafter("domino")
    with load(model, draft, verify_width=8, overlap_schedule=in_flight) as llm:
        outputs = llm.generate(PROMPTS, replace(GREEDY, speculation=False))
        metrics = llm.metrics()
    assert tokens(outputs) == tokens(target_only(model, PROMPTS))
    assert metrics.widths == {1: metrics.steps}
    assert (metrics.accept_lengths, metrics.blocks) == ({}, 0)


def test_two_ranks_hold_back_alike(tiny: TinyShelf) -> None:
    model, draft, params = tiny.target(), tiny.drafter("domino"), some_off(requests(False))
    alone = generate(model, draft, PROMPTS, params, verify_width=8)
    check_same(alone, generate(model, draft, PROMPTS, params, verify_width=8, tp_size=2))


def test_the_width_policy_learns_from_those_that_speculate_alone(tiny: TinyShelf) -> None:
    params = some_off(requests(False))
    with load(tiny.target(), tiny.drafter("domino"), verify_width="auto") as llm:
        policy = cycle_widths(llm)
        outputs = llm.generate(PROMPTS, params)
    told = sum(len(lengths) for _, _, lengths in policy.told)
    speculating = [output for i, output in enumerate(outputs) if i not in OFF]
    assert told == sum(map(len, accept_lengths(speculating)))
    assert {batch for batch, _, _ in policy.told} >= {4, 6}  # the time is the whole batch's


def test_what_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(Refused, match="speculation: found 0, wanted True or False"):
        SamplingParams(speculation=0)  # type: ignore[arg-type]
