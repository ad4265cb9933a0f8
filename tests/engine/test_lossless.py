"""Speculation changes no token: FP32 speculative runs equal target-only runs, greedy and seeded."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    with_seed,
)
from tests.tiny_models import TinyTarget

PROMPTS = random_prompts(12)
TARGETS = {
    "llama": TinyTarget(),
    "qwen3": TinyTarget("qwen3"),
    "llama-tied": TinyTarget(tied=True, permuted=False),
}


def models(tiny: TinyShelf, target: str, drafter: str) -> tuple[Path, Path]:
    recipe = TARGETS[target]
    return tiny.target(recipe), tiny.drafter(drafter, recipe)


@pytest.mark.parametrize("width", [2, 3, 8, 15, 16])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("target", ["llama", "qwen3"])
def test_greedy_equals_the_target_alone_at_every_width(
    tiny: TinyShelf, target: str, drafter: str, width: int
) -> None:
    model, draft = models(tiny, target, drafter)
    outputs = generate(model, draft, PROMPTS, verify_width=width)
    assert tokens(outputs) == tokens(target_only(model, PROMPTS))
    assert 1.1 < mean_accept_length(outputs) < width
    assert all(1 <= n <= width for lengths in accept_lengths(outputs) for n in lengths)
    check_against_reference(outputs[:3], model, draft, width)


def test_a_tied_head_serves_target_and_drafter(tiny: TinyShelf) -> None:
    model, draft = models(tiny, "llama-tied", "domino")
    outputs = generate(model, draft, PROMPTS, verify_width=16)
    assert tokens(outputs) == tokens(target_only(model, PROMPTS))
    check_against_reference(outputs[:3], model, draft, 16)


def test_width_1_is_the_target_alone(tiny: TinyShelf) -> None:
    model, draft = models(tiny, "llama", "domino")
    outputs = generate(model, draft, PROMPTS, verify_width=1)
    assert tokens(outputs) == tokens(target_only(model, PROMPTS))
    assert mean_accept_length(outputs) == 1


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_one_at_a_time_equals_all_together(tiny: TinyShelf, drafter: str) -> None:
    model, draft = models(tiny, "qwen3", drafter)
    with load(model, draft, verify_width=16, prefix_cache=False) as llm:
        alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    for batch in (3, 8):
        settings = {"max_batch_size": batch, "prefix_cache": False, "verify_width": 16}
        check_same(generate(model, draft, PROMPTS, **settings), alone)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_requests_that_join_and_leave_a_batch_do_not_notice_each_other(
    tiny: TinyShelf, drafter: str
) -> None:
    model, draft = models(tiny, "llama", drafter)
    alone = generate(model, draft, PROMPTS, max_batch_size=1, verify_width=8)
    caps = [5 + 11 * i % 43 for i in range(len(PROMPTS))]
    with load(model, draft, verify_width=8, max_batch_size=8, prefill_chunk=24) as llm:
        ids: list[str] = []
        finished = {}
        while len(finished) < len(PROMPTS):
            if len(ids) < len(PROMPTS):
                cap = caps[len(ids)]
                params = SamplingParams(temperature=0, max_tokens=cap, ignore_eos=True)
                ids.append(llm.add(PROMPTS[len(ids)], params))
            for output in llm.step():
                if output.finished is not None:
                    finished[output.request_id] = output.finished
    for request_id, cap, whole in zip(ids, caps, alone, strict=True):
        output = finished[request_id]
        assert output.token_ids == whole.token_ids[:cap]
        lengths = output.metrics.accept_lengths
        assert lengths[:-1] == whole.metrics.accept_lengths[: len(lengths) - 1]


@pytest.mark.parametrize("drafter", ["domino", "domino-shifted"])
@pytest.mark.parametrize("pool", [1, 24, 306, 307, 2048])
def test_the_candidate_pool_changes_proposals_only(
    tiny: TinyShelf, drafter: str, pool: int
) -> None:
    model, draft = models(tiny, "llama", drafter)
    settings = {"verify_width": 8, "speculative_domino_candidate_pool_size": pool}
    outputs = generate(model, draft, PROMPTS[:4], **settings)
    assert tokens(outputs) == tokens(target_only(model, PROMPTS))[:4]
    check_against_reference(outputs, model, draft, 8, pool)
    if pool >= 307:
        whole = generate(
            model, draft, PROMPTS[:4], **settings | {"speculative_domino_candidate_pool_size": 0}
        )
        check_same(outputs, whole)


SAMPLED = {
    "temperature": SamplingParams(temperature=0.8),
    "top-p": SamplingParams(temperature=1.2, top_p=0.9),
    "top-k": SamplingParams(temperature=1.5, top_k=5),
    "min-p": SamplingParams(temperature=1.5, min_p=0.05),
    "penalties": SamplingParams(
        temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.6
    ),
    "bad words": SamplingParams(temperature=1.3, bad_words=["e", "th", "an", "qx"]),
    "all": SamplingParams(
        temperature=1.1,
        top_p=0.95,
        top_k=40,
        min_p=0.01,
        repetition_penalty=1.1,
        frequency_penalty=0.3,
        bad_words=["er", "on"],
    ),
    "greedy with penalties": SamplingParams(
        temperature=0, repetition_penalty=1.5, presence_penalty=1.0
    ),
}


@pytest.mark.parametrize("sampled", SAMPLED)
@pytest.mark.parametrize("drafter", ["dflash", "domino-shifted", "mtp"])
def test_a_seeded_run_equals_the_seeded_target_alone(
    tiny: TinyShelf, drafter: str, sampled: str
) -> None:
    model, draft = models(tiny, "qwen3", drafter)
    params = [with_seed(SAMPLED[sampled], seed) for seed in range(len(PROMPTS))]
    params = [SamplingParams(**{**vars(p), "max_tokens": 32, "ignore_eos": True}) for p in params]
    alone = generate(model, None, PROMPTS, params)
    outputs = generate(model, draft, PROMPTS, params, verify_width=8)
    assert tokens(outputs) == tokens(alone)
    assert mean_accept_length(outputs) > 1
    one_by_one = generate(model, draft, PROMPTS, params, verify_width=16, max_batch_size=1)
    assert tokens(one_by_one) == tokens(alone)


def test_unseeded_requests_differ_from_each_other(tiny: TinyShelf) -> None:
    model, draft = models(tiny, "llama", "domino")
    params = SamplingParams(temperature=2.0, max_tokens=24, ignore_eos=True)
    outputs = generate(model, draft, [PROMPTS[0]] * 4, params)
    assert len({tuple(output.token_ids) for output in outputs}) == 4
