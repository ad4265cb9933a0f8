"""Targets with recurrent layers: every drafter at every width gives what the target alone does."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from knockon.engine.engine import Engine
from knockon.engine.llm import LLM
from knockon.engine.sampling_params import SamplingParams
from knockon.errors import Refused
from knockon.layers.recurrent_state import DeltaMemory
from knockon.models.gated_delta_net import GatedDeltaNet
from tests.engine.generation import (
    GREEDY,
    TinyShelf,
    abort_and_replace,
    check_against_reference,
    check_same,
    generate,
    load,
    mean_accept_length,
    random_prompts,
    target_only,
    tokens,
    with_seed,
)
from tests.reference_speculation import greedy_margin
from tests.tiny_models import TinyMTP, TinyTarget

TARGET = TinyTarget("qwen3_5")
PROMPTS = random_prompts(5)
SHORT = replace(GREEDY, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, max_tokens=24, ignore_eos=True)


def engine_of(llm: LLM) -> Engine:
    engine = llm._engine
    assert isinstance(engine, Engine)
    return engine


def test_the_target_alone_gives_what_transformers_gives(tiny: TinyShelf) -> None:
    model = tiny.target(TARGET)
    for output in target_only(model, PROMPTS, SHORT):
        assert greedy_margin(model, output.prompt_token_ids, output.token_ids) > 1e-4


@pytest.mark.parametrize("drafter", ["dflash", "domino", "domino-shifted", "mtp"])
@pytest.mark.parametrize("width", [2, 5, 16])
def test_greedy_equals_target_only_and_accept_lengths_the_specification(
    tiny: TinyShelf, drafter: str, width: int
) -> None:
    model, draft = tiny.target(TARGET), tiny.drafter(drafter, TARGET)
    outputs = generate(model, draft, PROMPTS, SHORT, verify_width=width)
    assert tokens(outputs) == tokens(target_only(model, PROMPTS, SHORT))
    check_against_reference(outputs[:2], model, draft, width)
    assert mean_accept_length(outputs) > 1.1


@pytest.mark.parametrize("drafter", ["domino", "mtp"])
def test_seeded_draws_equal_target_only(tiny: TinyShelf, drafter: str) -> None:
    model, draft = tiny.target(TARGET), tiny.drafter(drafter, TARGET)
    params = [with_seed(SAMPLED, seed) for seed in range(len(PROMPTS))]
    alone = generate(model, None, PROMPTS, params)
    for width in (3, 16):
        assert tokens(generate(model, draft, PROMPTS, params, verify_width=width)) == tokens(alone)


def test_a_targets_own_head_is_found_among_its_weights(tiny: TinyShelf, tmp_path: Path) -> None:
    model, apart = tiny.target(TARGET), tiny.drafter("mtp", TARGET)
    both = TinyMTP(own=True).save(tmp_path / "both", model)
    expected = generate(model, apart, PROMPTS, SHORT, verify_width=6)
    check_same(
        generate(both, None, PROMPTS, SHORT, verify_width=6, speculative_algorithm="MTP"), expected
    )
    assert tokens(generate(both, None, PROMPTS, SHORT)) == tokens(expected)


@pytest.mark.parametrize("drafter", [None, "domino", "mtp"])
def test_chunks_joins_leaves_and_preemption_change_nothing(
    tiny: TinyShelf, drafter: str | None
) -> None:
    model = tiny.target(TARGET)
    draft = tiny.drafter(drafter, TARGET) if drafter else None
    params = [replace(GREEDY, max_tokens=10 + 7 * i) for i in range(len(PROMPTS))]
    alone = [target_only(model, [p], q)[0] for p, q in zip(PROMPTS, params, strict=True)]
    width: dict[str, Any] = {"verify_width": 8} if draft else {}
    together = generate(
        model, draft, PROMPTS, params, max_batch_size=3, prefill_chunk=7, page_size=4, **width
    )
    assert tokens(together) == tokens(alone)
    with load(model, draft, page_size=4, max_batch_size=3, kv_memory=250_000, **width) as llm:
        per_page = 250_000 // engine_of(llm).scheduler.pool.num_pages
    tight = generate(
        model,
        draft,
        PROMPTS,
        params,
        page_size=4,
        max_batch_size=3,
        kv_memory=per_page * 36,
        max_model_len=110,
        **width,
    )
    assert sum(output.metrics.preemptions for output in tight) > 0
    assert tokens(tight) == tokens(alone)


@pytest.mark.parametrize(("drafter", "ranks"), [("domino", 2), ("mtp", 3)])
def test_several_ranks_give_what_one_gives(tiny: TinyShelf, drafter: str, ranks: int) -> None:
    model, draft = tiny.target(TARGET), tiny.drafter(drafter, TARGET)
    one = generate(model, draft, PROMPTS, SHORT, verify_width=8)
    check_same(generate(model, draft, PROMPTS, SHORT, verify_width=8, tp_size=ranks), one)


@pytest.mark.parametrize(("seed", "in_flight"), [(0, False), (1, False), (0, True), (3, True)])
def test_everything_at_once(tiny: TinyShelf, seed: int, in_flight: bool) -> None:
    """Few pages, fewer checkpoints, prompts that share beginnings, requests given up half-way."""
    model, draft = tiny.target(TARGET), tiny.drafter("mtp", TARGET)
    rng = random.Random(seed)
    stems = random_prompts(3, seed=seed, low=12, high=30)
    tails = random_prompts(14, seed=seed + 50, low=2, high=12)
    prompts = [[*rng.choice(stems)[: rng.randint(4, 29)], *tail] for tail in tails]
    params = [with_seed(replace(SAMPLED, max_tokens=rng.randint(3, 24)), n) for n in range(14)]
    alone = generate(model, None, prompts, params, prefix_cache=False)
    with load(model, draft, page_size=4, max_batch_size=3, kv_memory=250_000) as llm:
        per_page = 250_000 // engine_of(llm).scheduler.pool.num_pages
    with load(
        model,
        draft,
        page_size=4,
        max_batch_size=3,
        max_mamba_cache_size=6,
        kv_memory=per_page * 26,
        max_model_len=80,
        prefill_chunk=11,
        overlap_schedule=in_flight,
    ) as llm:
        ids = {llm.add(p, q): n for n, (p, q) in enumerate(zip(prompts, params, strict=True))}
        found: dict[int, Any] = {}
        given_up = set()
        while len(found) + len(given_up) < 14:
            for output in llm.step():
                if output.finished is not None:
                    found[ids[output.request_id]] = output.finished
            if rng.random() < 0.06:
                name = rng.choice(list(ids))
                if llm.abort(name) is not None:
                    given_up.add(ids[name])
        assert llm.occupancy().held_pages == 0
        scheduler = engine_of(llm).scheduler
        assert sorted(scheduler._free_slots) == list(range(len(scheduler._free_slots)))
    assert len(found) > 8
    for n, output in found.items():
        assert output.token_ids == alone[n].token_ids
    assert any(output.metrics.preemptions for output in found.values())
    assert any(output.metrics.cached_tokens for output in found.values())


def test_an_aborted_requests_slot_serves_another(tiny: TinyShelf) -> None:
    model, draft = tiny.target(TARGET), tiny.drafter("domino", TARGET)
    alone = generate(model, draft, PROMPTS[:3], SHORT, verify_width=6)
    with load(model, draft, verify_width=6, max_batch_size=2) as llm:
        check_same(abort_and_replace(llm, PROMPTS, SHORT), alone[1:])


@pytest.mark.parametrize("name", ["commit", "write_states", "write_inputs", "copy"])
def test_an_interrupted_step_loses_nothing(
    tiny: TinyShelf, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers' states have moved on and others have not: requests are computed again."""
    model, draft = tiny.target(TARGET), tiny.drafter("domino", TARGET)
    alone = generate(model, draft, PROMPTS[:3], SHORT, verify_width=6)
    original, calls = getattr(DeltaMemory, name), 0

    def interrupted(self: DeltaMemory, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        original(self, *arguments)
        if calls in (2, 20):
            raise KeyboardInterrupt

    # States are copied where a forward ends with a page, and not where one goes on beyond it.
    chunk = {"prefill_chunk": 4} if name == "copy" else {}
    with load(model, draft, verify_width=6, page_size=4, **chunk) as llm:
        monkeypatch.setattr(DeltaMemory, name, interrupted)
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
    assert broken > 0
    assert tokens([found[each] for each in ids]) == tokens(alone)


def test_states_in_bf16_are_the_same_at_every_width_and_near_those_in_fp32(
    tiny: TinyShelf,
) -> None:
    """Each token's state is rounded before the next, alone and in a block."""
    model, draft = tiny.target(TARGET), tiny.drafter("domino", TARGET)
    alone = generate(model, None, PROMPTS, SHORT, mamba_ssm_dtype="bfloat16")
    for width in (4, 16):
        outputs = generate(
            model, draft, PROMPTS, SHORT, verify_width=width, mamba_ssm_dtype="bfloat16"
        )
        assert tokens(outputs) == tokens(alone)
    with load(model, mamba_ssm_dtype="bfloat16") as narrow, load(model) as wide:
        held = engine_of(narrow).states, engine_of(wide).states
        assert held[0] is not None and held[1] is not None
        assert held[0].dtype == torch.bfloat16
        assert held[0].bytes < 0.65 * held[1].bytes
        assert narrow.capacity().state_bytes == held[0].bytes


def test_the_memory_reported_is_what_is_held(tiny: TinyShelf) -> None:
    with load(tiny.target(TARGET), tiny.drafter("domino", TARGET), max_batch_size=3) as llm:
        engine = engine_of(llm)
        runner: Any = engine.runner
        memories = runner._engines.states
        assert engine.states is not None
        assert len(memories) == 3
        assert engine.states.bytes == sum(memory.num_bytes for memory in memories)
        assert engine.states.states == 6 == len(memories[0].state)
        # A verified block is held with the projection's row of every position, as it stands there.
        mixer = next(m for m in engine.runner.target.modules() if isinstance(m, GatedDeltaNet))
        row = sum(mixer.projection.sizes) * engine.runner.target.dtype.itemsize
        assert engine.states.held_bytes > 3 * 3 * max(engine.widths.widths) * row
        # Pages hold keys and values of the one layer of attention alone, and the drafter's.
        assert sum(not isinstance(memory, DeltaMemory) for memory in runner._engines.kv) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_mamba_cache_size": 3, "max_batch_size": 4}, "found 3, wanted at least 4, one for"),
        ({"max_mamba_cache_size": 10**12}, "max_mamba_cache_size: found 10+, wanted at most"),
        ({"max_mamba_cache_size": 0}, "max_mamba_cache_size: found 0"),
        ({"mamba_ssm_dtype": "float8"}, "mamba_ssm_dtype: found 'float8'"),
        ({"tp_size": 4}, "tp_size: found 4"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tiny: TinyShelf, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused, match=message):
        load(tiny.target(TARGET), **settings)


def test_a_drafter_that_proposes_the_targets_own_tokens_is_always_agreed_with(
    tiny: TinyShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    from knockon.drafters.dflash import DFlashDrafter

    model, draft = tiny.target(TARGET), tiny.drafter("dflash", TARGET)
    (prompt,) = random_prompts(1, seed=3)
    cap = replace(GREEDY, max_tokens=49)
    (alone,) = target_only(model, [prompt], cap)
    text = torch.tensor([*prompt, *alone.token_ids, *[0] * 16])

    def told(self: Any, bonus: Any, plan: Any, steps: int) -> torch.Tensor:
        return text[plan.positions[:, 1 : 1 + steps]]

    monkeypatch.setattr(DFlashDrafter, "propose", told)
    (output,) = generate(model, draft, [prompt], cap, verify_width=16)
    assert output.token_ids == alone.token_ids
    assert output.metrics.accept_lengths == [16, 16, 16]
