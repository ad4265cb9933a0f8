"""KV in FP8: another rounding, the same with a drafter and without, and twice the positions."""

from __future__ import annotations

import pytest

from knockon.engine.config import EngineConfig
from knockon.errors import Refused
from tests.engine.generation import GREEDY, TinyShelf, generate, load, random_prompts, tokens
from tests.tiny_models import TinyTarget

PROMPTS = random_prompts(6)
FP8 = {"kv_cache_dtype": "fp8_e4m3"}
WANDERING = TinyTarget("qwen3", wander=2.2)


@pytest.mark.parametrize("steps_in_flight", (False, True))
@pytest.mark.parametrize("draft", ("domino", "mtp"))
def test_a_drafter_changes_no_token(tiny: TinyShelf, draft: str, steps_in_flight: bool) -> None:
    target = tiny.target(WANDERING)
    how = {"overlap_schedule": steps_in_flight, **FP8}
    alone = generate(target, None, PROMPTS, GREEDY, **how)
    ours = generate(target, tiny.drafter(draft, WANDERING), PROMPTS, GREEDY, verify_width=8, **how)
    assert tokens(ours) == tokens(alone)


def test_two_ranks_give_the_tokens_of_one(tiny: TinyShelf) -> None:
    target, draft = tiny.target(WANDERING), tiny.drafter("domino", WANDERING)
    one = generate(target, draft, PROMPTS, GREEDY, **FP8)
    assert tokens(generate(target, draft, PROMPTS, GREEDY, tp_size=2, **FP8)) == tokens(one)


def test_the_same_memory_holds_more_positions(tiny: TinyShelf) -> None:
    target = tiny.target()
    pages = []
    for settings in ({}, FP8):
        with load(target, kv_memory=4 << 20, page_size=4, **settings) as llm:
            pages.append(llm.capacity().num_pages)
    assert pages[1] > 3.9 * pages[0]  # FP32 to FP8


def test_unknown_types_are_refused() -> None:
    with pytest.raises(Refused, match=r"kv_cache_dtype.*fp8_e5m2.*auto, fp8_e4m3"):
        EngineConfig("m", kv_cache_dtype="fp8_e5m2")
