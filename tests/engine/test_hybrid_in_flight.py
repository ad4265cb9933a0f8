"""Steps in flight give a target with recurrent layers what steps run to their end give it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from knockon.engine.engine import Engine
from knockon.engine.llm import LLM
from knockon.engine.pipelined import PipelinedRunner
from knockon.layers.recurrent_state import DeltaMemory
from tests.engine.generation import (
    GREEDY,
    TinyShelf,
    abort_and_replace,
    check_same,
    generate,
    load,
    random_prompts,
    tokens,
    with_seed,
)
from tests.engine.test_hybrid import SAMPLED, SHORT, TARGET
from tests.engine.test_pipelined import ReplayedByHand

PROMPTS = random_prompts(7)


def runner_of(llm: LLM) -> PipelinedRunner:
    engine = llm._engine
    assert isinstance(engine, Engine) and isinstance(engine.runner, PipelinedRunner)
    return engine.runner


@pytest.mark.parametrize("drafter", [None, "domino", "mtp"])
def test_requests_that_join_and_leave(tiny: TinyShelf, drafter: str | None) -> None:
    """Chunks of several requests go together, the shorter ones padded."""
    model = tiny.target(TARGET)
    draft = tiny.drafter(drafter, TARGET) if drafter else None
    params = [replace(GREEDY, max_tokens=6 + 4 * i) for i in range(len(PROMPTS))]
    params[3:5] = [with_seed(SAMPLED, 3), with_seed(SAMPLED, 4)]
    settings: dict[str, Any] = {"max_batch_size": 4, "prefill_chunk": 50}
    plain = generate(model, draft, PROMPTS, params, **settings)
    check_same(generate(model, draft, PROMPTS, params, overlap_schedule=True, **settings), plain)


def test_prefixes_met_again_and_checkpoints_that_give_way(tiny: TinyShelf) -> None:
    model, draft = tiny.target(TARGET), tiny.drafter("dflash", TARGET)
    shared = random_prompts(1, low=41, high=42)[0]
    prompts = [[*shared, *tail[:9]] for tail in random_prompts(4, seed=6, low=9, high=20)]
    cold = generate(model, draft, prompts, SHORT, prefix_cache=False)
    settings = {"page_size": 4, "max_batch_size": 2, "max_mamba_cache_size": 5}
    with load(model, draft, overlap_schedule=True, **settings) as llm:
        for _ in range(2):
            warm = [llm.generate([prompt], SHORT)[0] for prompt in prompts]
            check_same(warm, cold)
        assert warm[-1].metrics.cached_tokens == 40
        assert llm.occupancy().cached_states == 3
        check_same(llm.generate(prompts, SHORT), cold)
        # One slot a request, one that stands for nothing, and the checkpoints.
        (memory, *_) = runner_of(llm)._engines.states
        assert len(memory.state) == 2 + 1 + 3


def test_an_aborted_requests_slot_serves_another_while_a_step_is_in_flight(
    tiny: TinyShelf,
) -> None:
    model, draft = tiny.target(TARGET), tiny.drafter("domino", TARGET)
    alone = generate(model, draft, PROMPTS[:3], SHORT)
    with load(model, draft, overlap_schedule=True, max_batch_size=2) as llm:
        check_same(abort_and_replace(llm, PROMPTS, SHORT), alone[1:])


def test_an_interrupted_launch_loses_nothing(
    tiny: TinyShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draft = tiny.target(TARGET), tiny.drafter("domino", TARGET)
    alone = generate(model, draft, PROMPTS[:3], SHORT)
    original, calls = DeltaMemory.commit, 0

    def interrupted(self: DeltaMemory, lengths: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        original(self, lengths)
        if calls in (2, 20):
            raise KeyboardInterrupt

    monkeypatch.setattr(DeltaMemory, "commit", interrupted)
    with load(model, draft, overlap_schedule=True, page_size=4) as llm:
        ids = [llm.add(prompt, SHORT) for prompt in PROMPTS[:3]]
        found, broken = {}, 0
        while len(found) < 3:
            try:
                outputs = llm.step()
            except KeyboardInterrupt:
                broken += 1
                continue
            for output in outputs:
                if output.finished is not None:
                    found[output.request_id] = output.finished
    assert broken == 2
    assert tokens([found[each] for each in ids]) == tokens(alone)


def test_an_interrupted_capture_leaves_no_slots_misnamed(
    tiny: TinyShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a graph is made its slots are idle ones: nobody's steps may be run on those."""
    model, draft = tiny.target(TARGET), tiny.drafter("domino", TARGET)
    plain = generate(model, draft, PROMPTS[:2], SHORT)
    with load(model, draft, overlap_schedule=True, max_batch_size=2) as llm:
        runner = runner_of(llm)
        graphs = ReplayedByHand()
        runner.graphs = graphs  # type: ignore[assignment]
        runner._slots = {2: torch.full((2,), runner.state.idle)}

        def interrupted(key: object, run: Any) -> SimpleNamespace:
            run()
            raise KeyboardInterrupt

        ids = [llm.add(prompt, SHORT) for prompt in PROMPTS[:2]]
        with monkeypatch.context() as patch:
            patch.setattr(graphs, "capture", interrupted)
            with pytest.raises(KeyboardInterrupt):
                for _ in range(3):
                    llm.step()
        found = {}
        while len(found) < 2:
            outputs = [output.finished for output in llm.step() if output.finished is not None]
            found |= {output.id: output for output in outputs}
        assert tokens([found[name] for name in ids]) == tokens(plain)


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", [None, "domino", "mtp"])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_gpu_gives_the_same_with_and_without_graphs(
    tiny: TinyShelf, drafter: str | None, graphs: bool
) -> None:
    model = tiny.target(TARGET)
    draft = tiny.drafter(drafter, TARGET) if drafter else None
    one_by_one = {"device": "cuda", "overlap_schedule": False, "kv_memory": 64 << 20}
    plain = generate(model, None, PROMPTS, SHORT, **one_by_one)
    found = generate(
        model,
        draft,
        PROMPTS,
        SHORT,
        device="cuda",
        overlap_schedule=True,
        cuda_graph=graphs,
        max_batch_size=4,
        kv_memory=64 << 20,
    )
    assert tokens(found) == tokens(plain)
