"""Several ranks, real processes over gloo: the tokens and accept lengths of one rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from knockon.engine.llm import LLM
from knockon.errors import RankFailed, Refused
from tests.engine.generation import (
    GREEDY,
    TinyShelf,
    check_against_reference,
    check_same,
    generate,
    load,
    mean_accept_length,
    random_prompts,
    target_only,
    tokens,
)
from tests.tiny_models import TinyDrafter, TinyTarget

PROMPTS = random_prompts(6, seed=21, high=40)
# 9 heads in 3 groups: 6 and 3 on two ranks; 307 tokens: 154 and 153, or 103, 103 and 101.


@pytest.mark.parametrize(
    ("ranks", "family", "drafter", "pool"),
    [
        (2, "llama", "domino", 0),
        (2, "qwen3", "dflash", 0),
        (2, "qwen3", "mtp", 0),
        (3, "llama", "mtp", 0),
        (3, "llama", "domino", 0),
        (3, "qwen3", "domino-shifted", 24),
    ],
)
def test_ranks_give_the_tokens_and_accept_lengths_of_one(
    tiny: TinyShelf, ranks: int, family: str, drafter: str, pool: int
) -> None:
    recipe = TinyTarget(family)
    model, draft = tiny.target(recipe), tiny.drafter(drafter, recipe)
    settings = {"verify_width": 8, "speculative_domino_candidate_pool_size": pool}
    one = generate(model, draft, PROMPTS, **settings)
    with load(model, draft, tp_size=ranks, **settings) as llm:
        several = llm.generate(PROMPTS, GREEDY)
        alone = llm.generate(PROMPTS[0], GREEDY)
    check_same(several, one)
    check_same(alone, one[:1])
    check_against_reference(several[:3], model, draft, 8, pool)
    assert tokens(several) == tokens(target_only(model, PROMPTS))
    assert 1.1 < mean_accept_length(several) < 8


@pytest.mark.parametrize(
    ("ranks", "pool", "exchange"),
    [
        *((ranks, 64, exchange) for ranks in (1, 2, 3) for exchange in ("full", "compact")),
        *((ranks, 2048, "compact") for ranks in (1, 2, 3)),  # more than V: all of it, in full
        (1, 0, "full"),  # on more ranks above
    ],
)
def test_every_pool_and_exchange_is_lossless_on_any_number_of_ranks(
    tiny: TinyShelf, ranks: int, pool: int, exchange: str
) -> None:
    model, draft = tiny.target(), tiny.drafter("domino")
    settings = {"verify_width": 16, "speculative_domino_candidate_pool_size": pool}
    with load(model, draft, tp_size=ranks, speculative_domino_exchange=exchange, **settings) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        taken = llm.metrics().exchanges
    assert list(taken) == ["full" if pool == 2048 else exchange]
    assert tokens(outputs) == tokens(target_only(model, PROMPTS))
    # Accept lengths too are those that the specification gives, whatever ranks and exchange.
    check_against_reference(outputs, model, draft, 16, pool)
    check_same(outputs, generate(model, draft, PROMPTS, **settings))
    assert 1.1 < mean_accept_length(outputs) < 16


def test_one_kv_head_is_replicated_over_the_ranks(tiny: TinyShelf) -> None:
    recipe = TinyTarget(kv_heads=1)
    model, draft = tiny.target(recipe), tiny.drafter(TinyDrafter(kv_heads=1), recipe)
    one = generate(model, draft, PROMPTS[:3], verify_width=8)
    check_same(generate(model, draft, PROMPTS[:3], verify_width=8, tp_size=3), one)
    check_against_reference(one, model, draft, 8)


def test_heads_of_a_drafter_are_dealt_otherwise_than_the_targets(tiny: TinyShelf) -> None:
    model, draft = tiny.target(), tiny.drafter(TinyDrafter(kv_heads=1))
    one = generate(model, draft, PROMPTS[:3], verify_width=8)
    check_same(generate(model, draft, PROMPTS[:3], verify_width=8, tp_size=3), one)


@pytest.mark.parametrize("ranks", [4, 5, 6])
def test_ranks_that_the_heads_cannot_be_dealt_to_are_refused(tiny: TinyShelf, ranks: int) -> None:
    with pytest.raises(Refused, match=rf"tp_size: found {ranks}, wanted one of \[1, 2, 3, 9\]"):
        load(tiny.target(), tiny.drafter("domino"), tp_size=ranks)


def test_sampled_requests_of_all_kinds_on_two_ranks(tiny: TinyShelf) -> None:
    model, draft = tiny.target(), tiny.drafter("domino-shifted")
    short = replace(GREEDY, max_tokens=32, temperature=1.0)
    params = [
        replace(short, temperature=0.9, seed=1),
        replace(short, temperature=0),
        replace(short, temperature=1.2, top_p=0.9, top_k=30, seed=2),
        replace(short, seed=3, frequency_penalty=0.8, logprobs=2),
        replace(short, temperature=1.5, min_p=0.05, seed=4, bad_words=["e"]),
        replace(short, temperature=2.0),  # unseeded
    ]
    one = generate(model, draft, PROMPTS, params, verify_width=8)
    with load(model, draft, tp_size=2, verify_width=8) as llm:
        several = llm.generate(PROMPTS, params)
    check_same(several[:5], one[:5])
    assert several[5].token_ids != one[5].token_ids
    assert several[3].logprobs is not None and one[3].logprobs is not None
    assert [p.logprob for p in several[3].logprobs] == pytest.approx(
        [p.logprob for p in one[3].logprobs], abs=1e-4
    )


def test_preemption_prefix_hits_and_aborts_on_two_ranks(tiny: TinyShelf) -> None:
    model, draft = tiny.target(), tiny.drafter("domino")
    roomy = generate(model, draft, PROMPTS, verify_width=8)
    settings = {"verify_width": 8, "max_batch_size": 4, "page_size": 4, "prefill_chunk": 16}
    # 40 usable pages of what one rank needs; the other has fewer heads, and must follow.
    per_position = 2 * 4 * (4 * 2 * 16 + 3 * 2 * 16)
    with load(model, draft, tp_size=2, kv_memory=2 * per_position * 4 * 41, **settings) as llm:
        tight = llm.generate(PROMPTS, GREEDY)
        victim = llm.add(PROMPTS[0], GREEDY)
        llm.step()
        assert llm.abort(victim) is not None
        again = llm.generate(PROMPTS, GREEDY)
    assert sum(output.metrics.preemptions for output in tight) > 0
    assert sum(output.metrics.cached_tokens for output in again) > 0
    check_same(tight, roomy)
    check_same(again, roomy)


def test_ranks_refuse_as_one_and_go_on(tiny: TinyShelf) -> None:
    with load(tiny.target(), tiny.drafter("domino"), tp_size=2, max_model_len=80) as llm:
        with pytest.raises(Refused, match="prompt token id"):
            llm.generate([[1, 2, 999]], GREEDY)
        with pytest.raises(Refused, match="prompt length"):
            llm.generate([[1] * 80], GREEDY)
        assert len(llm.generate([[1, 2, 3]], replace(GREEDY, max_tokens=4))[0].token_ids) == 4


def test_ranks_refuse_weights_as_one(tiny: TinyShelf) -> None:
    other = tiny.drafter(TinyDrafter(target_layer_ids=(0, 3)))
    with pytest.raises(Refused, match="target_layer_ids: found 3, wanted 0 to 2"):
        load(tiny.target(), other, tp_size=2)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_dies_in_mid_generation_is_named_and_nothing_is_left(
    tiny: TinyShelf, victim: int
) -> None:
    llm: LLM = load(tiny.target(), tiny.drafter("domino"), tp_size=3, verify_width=8)
    try:
        assert llm._pool is not None
        pids = llm._pool.pids
        request = llm.add(PROMPTS[0], replace(GREEDY, max_tokens=400))
        assert llm.step()[0].request_id == request
        killer = threading.Timer(0.05, os.kill, (pids[victim], signal.SIGKILL))
        killer.start()
        with ends_within(10), pytest.raises(RankFailed, match=rf"rank {victim}\b"):
            while True:
                llm.step()
        assert llm.failed
        with pytest.raises(RankFailed):
            llm.generate([[1, 2]], GREEDY)
        with ends_within(5):
            while any(is_running(pid) for pid in pids):
                time.sleep(0.02)
    finally:
        llm.close()
    llm.close()
