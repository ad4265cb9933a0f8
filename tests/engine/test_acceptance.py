"""Acceptance does not sink in silence: accept lengths are the same however a state came about.

Pitfalls 1 to 5, 16 and 17. Each test compares accept lengths beside tokens; the reference ones come
from :mod:`tests.reference_speculation`, which has neither cache nor batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from knockon.engine.engine import Engine
from knockon.engine.llm import LLM
from knockon.engine.request import RequestOutput
from knockon.engine.sampling_params import SamplingParams
from tests.engine.generation import (
    DRAFTERS,
    GREEDY,
    TinyShelf,
    accept_lengths,
    check_against_reference,
    check_same,
    generate,
    load,
    mean_accept_length,
    random_prompts,
    target_only,
    tokens,
)
from tests.tiny_models import HIDDEN, TinyDrafter, TinyTarget

LONG = random_prompts(3, seed=11, low=70, high=100)
CHUNK = 16
PAGE = 4


def engine_of(llm: LLM) -> Engine:
    assert llm._engine is not None
    return llm._engine


def check_nothing_is_held(llm: LLM) -> None:
    scheduler = engine_of(llm).scheduler
    assert not scheduler.has_unfinished
    assert scheduler.pool.available == scheduler.pool.usable
    assert scheduler.running == []
    assert engine_of(llm)._stops == {}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_cached_prefix_brings_its_draft_context_along(tiny: TinyShelf, drafter: str) -> None:
    model, draft = tiny.target(), tiny.drafter(drafter)
    shared = LONG[0][:50]
    prompts = [[*shared, 7, 8], [*shared, 9], shared, shared[:40]]
    cold = generate(model, draft, prompts, verify_width=8, prefix_cache=False)
    assert all(output.metrics.cached_tokens == 0 for output in cold)
    with load(model, draft, verify_width=8, page_size=PAGE) as llm:
        llm.generate(LONG[0], GREEDY)
        cached = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
        again = llm.generate(prompts, GREEDY)
        check_nothing_is_held(llm)
    assert [output.metrics.cached_tokens for output in cached] == [48, 48, 48, 36]
    assert [output.metrics.cached_tokens for output in again] == [48, 48, 48, 36]
    check_same(cached, cold)
    check_same(again, cold)
    check_against_reference(cached, model, draft, 8)


@pytest.mark.parametrize("drafter", ["domino-shifted", "mtp"])
def test_generated_tokens_are_cached_with_their_draft_context(
    tiny: TinyShelf, drafter: str
) -> None:
    """A second turn, whose prompt holds the first one's output: KV that verification wrote."""
    model, draft = tiny.target(), tiny.drafter(drafter)
    with load(model, draft, verify_width=8, page_size=PAGE) as llm:
        first = llm.generate(LONG[0], GREEDY)[0]
        second = [*LONG[0], *first.token_ids, 5, 6, 7]
        warm = llm.generate(second, GREEDY)[0]
    assert warm.metrics.cached_tokens > len(LONG[0])
    cold = generate(model, draft, [second], verify_width=8)
    check_same([warm], cold)
    check_against_reference([warm], model, draft, 8)


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 5 * CHUNK])
@pytest.mark.parametrize("drafter", ["dflash", "domino", "mtp"])
def test_every_prefill_chunk_reaches_the_drafter(
    tiny: TinyShelf, drafter: str, length: int
) -> None:
    model, draft = tiny.target(TinyTarget("qwen3")), tiny.drafter(drafter, TinyTarget("qwen3"))
    prompt = LONG[1][:length] if length <= len(LONG[1]) else (LONG[1] * 2)[:length]
    whole = generate(model, draft, [prompt], verify_width=16)
    chunked = generate(model, draft, [prompt], verify_width=16, prefill_chunk=CHUNK)
    check_same(chunked, whole)
    check_against_reference(chunked, model, draft, 16)


@pytest.mark.parametrize("layers", ["s", "ss", "sf", "fs"])
@pytest.mark.parametrize("domino", [True, False])
def test_prompts_far_beyond_the_window_of_sliding_layers(
    tiny: TinyShelf, layers: str, domino: bool
) -> None:
    model = tiny.target()
    draft = tiny.drafter(TinyDrafter(domino=domino, layer_types=layers, window=6))
    outputs = generate(model, draft, LONG, verify_width=8, page_size=PAGE)
    assert tokens(outputs) == tokens(target_only(model, LONG))
    check_against_reference(outputs, model, draft, 8)


@pytest.mark.parametrize("block", [2, 3, 5, 8, 16])
def test_every_width_up_to_the_block_of_the_drafter(tiny: TinyShelf, block: int) -> None:
    """A narrower verification stops the chain earlier and changes nothing before that."""
    model, draft = tiny.target(), tiny.drafter(TinyDrafter(block_size=block, shift_label=True))
    prompts = LONG[:2]
    means = []
    for width in sorted({2, block - 2, block - 1, block} - {0, 1, *range(block + 1, 99)}):
        outputs = generate(model, draft, prompts, verify_width=width)
        assert tokens(outputs) == tokens(target_only(model, prompts))
        check_against_reference(outputs, model, draft, width)
        means.append(mean_accept_length(outputs))
    assert means == sorted(means)


def run_staggered(
    llm: LLM, prompts: list[list[int]], params: SamplingParams
) -> list[RequestOutput]:
    ids, done = [], {}
    for prompt in prompts:
        ids.append(llm.add(prompt, params))
        for output in llm.step():
            if output.finished is not None:
                done[output.request_id] = output.finished
    while len(done) < len(ids):
        for output in llm.step():
            if output.finished is not None:
                done[output.request_id] = output.finished
    return [done[request_id] for request_id in ids]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_live_requests_of_different_lengths_keep_to_their_own_rows(
    tiny: TinyShelf, drafter: str
) -> None:
    model, draft = tiny.target(), tiny.drafter(drafter)
    prompts = [[3], LONG[0], [5, 6, 7], LONG[2], LONG[1][:20]]
    with load(model, draft, verify_width=8, prefill_chunk=32, page_size=PAGE) as llm:
        outputs = run_staggered(llm, prompts, GREEDY)
        check_nothing_is_held(llm)
    assert tokens(outputs) == tokens(target_only(model, prompts))
    check_against_reference(outputs, model, draft, 8)


def pages_of(pages: int, mtp: bool = False, **settings: Any) -> dict[str, Any]:
    """Settings under which there are exactly ``pages`` usable pages."""
    element, target, drafter = 4, 4 * 3 * 16, 3 * 3 * 16
    per_page = 2 * element * (target + drafter) * PAGE
    if mtp:
        per_page = element * (2 * (target + 3 * 16) + HIDDEN) * PAGE
    return {"kv_memory": per_page * (pages + 1), "page_size": PAGE, **settings}


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("drafter", ["dflash", "domino", "mtp"])
def test_a_preempted_request_loses_neither_tokens_nor_acceptance(
    tiny: TinyShelf, drafter: str, prefix_cache: bool
) -> None:
    model, draft = tiny.target(), tiny.drafter(drafter)
    prompts = random_prompts(6, seed=3, low=4, high=20)
    roomy = generate(model, draft, prompts, verify_width=8)
    settings = pages_of(24, drafter == "mtp", prefix_cache=prefix_cache, verify_width=8)
    with load(model, draft, **settings) as llm:
        assert engine_of(llm).scheduler.pool.usable == 24
        tight = llm.generate(prompts, GREEDY)
        check_nothing_is_held(llm)
    assert sum(output.metrics.preemptions for output in tight) > 0
    assert not any(output.metrics.cached_tokens for output in tight)  # their own pages are no hit
    check_same(tight, roomy)
    check_against_reference(tight, model, draft, 8)


def test_a_preempted_sampled_request_goes_on_as_it_would_have(tiny: TinyShelf) -> None:
    """Penalty counts and noise are made again from the output so far, not from scratch."""
    model, draft = tiny.target(), tiny.drafter("domino")
    prompts = random_prompts(6, seed=3, low=4, high=20)
    params = [
        replace(
            GREEDY,
            temperature=0.9,
            seed=i,
            frequency_penalty=0.5,
            bad_words=["th", "e"],
            logprobs=2,
        )
        for i in range(len(prompts))
    ]
    roomy = generate(model, draft, prompts, params, verify_width=8)
    with load(model, draft, **pages_of(24, verify_width=8)) as llm:
        tight = llm.generate(prompts, params)
    assert sum(output.metrics.preemptions for output in tight) > 0
    check_same(tight, roomy)
    for ours, theirs in zip(tight, roomy, strict=True):
        assert ours.logprobs is not None and theirs.logprobs is not None
        assert [p.token_id for p in ours.logprobs] == ours.token_ids
        assert [p.logprob for p in ours.logprobs] == pytest.approx(
            [p.logprob for p in theirs.logprobs], abs=1e-4
        )


@pytest.mark.parametrize("when", ["queued", "prefill", "decode"])
def test_an_aborted_request_stops_at_once_and_leaves_nothing(tiny: TinyShelf, when: str) -> None:
    model, draft = tiny.target(), tiny.drafter("domino")
    settings = {"verify_width": 8, "prefill_chunk": CHUNK, "max_batch_size": 2}
    with load(model, draft, **settings) as llm:
        others = [llm.add(LONG[0], GREEDY)]
        if when == "queued":
            others.append(llm.add(LONG[1], GREEDY))
        victim = llm.add(LONG[2], replace(GREEDY, max_tokens=200))
        steps = {"queued": 1, "prefill": 8, "decode": 24}[when]
        done = {}

        def step() -> None:
            for output in llm.step():
                assert output.request_id != victim or not aborted
                if output.finished is not None:
                    done[output.request_id] = output.finished

        aborted = False
        for _ in range(steps):
            step()
        request = next(
            r
            for r in [*engine_of(llm).scheduler.waiting, *engine_of(llm).scheduler.running]
            if r.id == victim
        )
        assert request.phase.value == {"queued": "waiting"}.get(when, when)
        result = llm.abort(victim)
        aborted = True
        assert result is not None and result.finish_reason == "abort"
        assert bool(result.token_ids) == (when == "decode")
        assert llm.abort(victim) is None
        while not done.keys() >= set(others):
            step()
        check_nothing_is_held(llm)
        outputs = [done[request_id] for request_id in others]
        whole = llm.generate(LONG, GREEDY)
    check_same(outputs, whole[: len(outputs)])
    check_against_reference(whole, model, draft, 8)
    if when == "decode":
        assert result.token_ids[:48] == whole[2].token_ids[: len(result.token_ids)]


def test_a_closed_stream_is_aborted(tiny: TinyShelf) -> None:
    with load(tiny.target(), tiny.drafter("domino"), verify_width=8) as llm:
        stream = llm.stream(LONG[0], GREEDY)
        next(stream)
        next(stream)
        stream.close()
        check_nothing_is_held(llm)


def test_a_refused_prompt_leaves_no_other_behind(tiny: TinyShelf) -> None:
    with load(tiny.target(), tiny.drafter("domino")) as llm:
        with pytest.raises(ValueError, match="prompt token id"):
            llm.generate([LONG[0], [1, 2, 999]], GREEDY)
        check_nothing_is_held(llm)


def test_accept_lengths_count_what_was_kept(tiny: TinyShelf) -> None:
    model, draft = tiny.target(), tiny.drafter("domino-shifted")
    for cap in range(1, 14):
        (output,) = generate(model, draft, LONG[:1], replace(GREEDY, max_tokens=cap))
        assert len(output.token_ids) == cap
        assert 1 + sum(output.metrics.accept_lengths) == cap
        assert accept_lengths([output])[0] == [] or min(accept_lengths([output])[0]) >= 1


def test_a_request_that_fills_the_context_ends_there(tiny: TinyShelf) -> None:
    model, draft = tiny.target(), tiny.drafter("domino")
    params = replace(GREEDY, max_tokens=500)
    settings = {"max_model_len": 120, "page_size": PAGE}
    outputs = generate(model, draft, LONG, params, verify_width=16, **settings)
    assert [len(o.prompt_token_ids) + len(o.token_ids) for o in outputs] == [120] * 3
    assert [o.finish_reason for o in outputs] == ["length"] * 3
    alone = generate(model, None, LONG, params, **settings)
    assert tokens(outputs) == tokens(alone)
    check_against_reference(outputs, model, draft, 16)


def test_the_whole_context_of_the_model_can_be_used(tiny: TinyShelf) -> None:
    """The last block begins at the last position: tables and pages must reach past the end."""
    recipe = TinyTarget(max_positions=64)
    model = tiny.target(recipe)
    draft = tiny.drafter(TinyDrafter(max_positions=64), recipe)
    prompt = LONG[0][:50]
    (output,) = generate(model, draft, [prompt], replace(GREEDY, max_tokens=99), verify_width=16)
    assert len(output.token_ids) == 14 and output.finish_reason == "length"
    check_against_reference([output], model, draft, 16)
