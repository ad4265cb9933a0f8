"""Prefix hits of targets with recurrent layers: gone on from checkpoints, changing nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from knockon.engine.checkpoints import Checkpoints, Found
from knockon.layers.recurrent_state import DeltaMemory
from tests.engine.generation import TinyShelf, check_same, generate, load, random_prompts
from tests.engine.test_hybrid import PROMPTS, SHORT, TARGET, engine_of


@pytest.mark.parametrize("drafter", [None, "dflash", "mtp"])
def test_prefix_hits_go_on_from_checkpoints_and_change_nothing(
    tiny: TinyShelf, drafter: str | None
) -> None:
    model = tiny.target(TARGET)
    draft = tiny.drafter(drafter, TARGET) if drafter else None
    width: dict[str, Any] = {"verify_width": 8} if draft else {}
    shared = random_prompts(1, low=41, high=42)[0]
    prompts = [[*shared, *tail[:9]] for tail in random_prompts(4, seed=6, low=9, high=20)]
    cold = [
        generate(model, draft, [prompt], SHORT, prefix_cache=False, **width)[0]
        for prompt in prompts
    ]
    with load(model, draft, page_size=4, **width) as llm:
        warm = [llm.generate([prompt], SHORT)[0] for prompt in prompts]
        # The second meets pages but no checkpoint where it parts from the first, and leaves one
        # there for the third.
        assert [output.metrics.cached_tokens for output in warm] == [0, 0, 40, 40]
        follow = [*prompts[3], *warm[3].token_ids, 7, 8, 9]
        again = llm.generate([prompts[0], follow], SHORT)
        assert again[0].metrics.cached_tokens == 48
        assert again[1].metrics.cached_tokens == 48
        occupancy = llm.occupancy()
        assert occupancy.cached_states > 4
        llm.flush_cache()
        assert llm.occupancy().cached_states == 0
    check_same(warm, cold)
    check_same([again[0]], [cold[0]])
    check_same([again[1]], generate(model, draft, [follow], SHORT, prefix_cache=False, **width))


@pytest.mark.parametrize("in_flight", [False, True])
def test_the_same_prompt_many_times_at_once_leaves_others_their_states(
    tiny: TinyShelf, in_flight: bool
) -> None:
    one, other = random_prompts(2, seed=3, low=45, high=50)
    settings = {"page_size": 4, "max_batch_size": 3, "overlap_schedule": in_flight}
    with load(tiny.target(TARGET), **settings) as llm:
        for prompt in (one, other):
            llm.generate([prompt] * 3, SHORT)
        again = llm.generate([one], SHORT)
        assert again[0].metrics.cached_tokens == 44
        assert llm.occupancy().cached_states == 2


def test_a_state_that_was_not_copied_to_its_end_is_gone_on_from_by_nobody(
    tiny: TinyShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = tiny.target(TARGET), random_prompts(1, low=30, high=31)[0]
    cold = generate(model, None, [prompt], SHORT)
    original = DeltaMemory.copy

    def interrupted(self: DeltaMemory, source: int, target: int) -> None:
        original(self, source, target)
        raise KeyboardInterrupt

    # Copied where a forward ends with a page, and not where one goes on beyond it.
    with load(model, page_size=4, prefill_chunk=28) as llm:
        name = llm.add(prompt, SHORT)
        with monkeypatch.context() as patch:
            patch.setattr(DeltaMemory, "copy", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.step()
        assert llm.occupancy().cached_states == 0
        found = []
        while not found:
            found = [o.finished for o in llm.step() if o.finished is not None]
        assert found[0].id == name
        check_same(found, cold)
        assert llm.occupancy().cached_states == 1
        check_same(llm.generate([prompt], SHORT), cold)


def test_an_interrupted_search_for_a_state_loses_no_request(
    tiny: TinyShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.target(TARGET)
    cold = generate(model, None, PROMPTS[:2], SHORT)
    original, calls = Checkpoints.deepest, 0

    def interrupted(self: Checkpoints, pages: list[int]) -> Found | None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return original(self, pages)

    with load(model, page_size=4, max_batch_size=2) as llm:
        monkeypatch.setattr(Checkpoints, "deepest", interrupted)
        names = [llm.add(prompt, SHORT) for prompt in PROMPTS[:2]]
        with pytest.raises(KeyboardInterrupt):
            llm.step()
        occupancy = llm.occupancy()
        assert occupancy.running + occupancy.waiting == 2
        found = {}
        while len(found) < 2:
            ended = [o.finished for o in llm.step() if o.finished is not None]
            found |= {output.id: output for output in ended}
    check_same([found[name] for name in names], cold)


def test_pages_of_one_position(tiny: TinyShelf) -> None:
    model, draft = tiny.target(TARGET), tiny.drafter("mtp", TARGET)
    cold = generate(model, draft, PROMPTS[:2], SHORT, prefix_cache=False, verify_width=8)
    with load(model, draft, page_size=1, verify_width=8) as llm:
        check_same(llm.generate(PROMPTS[:2], SHORT), cold)
        again = llm.generate(PROMPTS[:2], SHORT)
    check_same(again, cold)
    assert [o.metrics.cached_tokens for o in again] == [len(p) - 1 for p in PROMPTS[:2]]


def test_going_through_shared_pages_for_states_writes_nothing_there(tiny: TinyShelf) -> None:
    shared = random_prompts(1, low=41, high=42)[0]
    with load(tiny.target(TARGET), tiny.drafter("dflash", TARGET), page_size=4) as llm:
        llm.generate([[*shared, 5, 6, 7, 3, 3, 3, 3]], SHORT)
        runner: Any = engine_of(llm).runner
        slots = torch.tensor(sorted(engine_of(llm).scheduler.pool._by_page)).unsqueeze(1) * 4
        slots = (slots + torch.arange(4)).flatten()
        kept = [m for m in runner._engines.kv if not isinstance(m, DeltaMemory)]
        arrays = [array for kv in [*kept, *runner.drafter._kv] for array in kv]
        before = [array[slots].clone() for array in arrays]
        assert len(slots) > 40 and all(array.any() for array in before)
        (output,) = llm.generate([[*shared, 8, 9, 10]], SHORT)
        assert output.metrics.cached_tokens == 0
        for array, held in zip(arrays, before, strict=True):
            assert torch.equal(array[slots], held)


def test_few_checkpoints_give_way_and_none_switches_hits_off(tiny: TinyShelf) -> None:
    model = tiny.target(TARGET)
    cold = generate(model, None, PROMPTS, SHORT, prefix_cache=False)
    with load(model, page_size=4, max_batch_size=2, max_mamba_cache_size=4) as llm:
        assert llm.capacity().num_checkpoints == 2
        for _ in range(3):
            check_same(llm.generate(PROMPTS, SHORT), cold)
            assert llm.occupancy().cached_states == 2
        first = llm.generate(PROMPTS[:1], SHORT)
        check_same(first + llm.generate(PROMPTS[:1], SHORT), [cold[0], cold[0]])
    with load(model, page_size=4, max_batch_size=2, max_mamba_cache_size=2) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS[:2], SHORT)
            check_same(outputs, cold[:2])
            assert [output.metrics.cached_tokens for output in outputs] == [0, 0]
