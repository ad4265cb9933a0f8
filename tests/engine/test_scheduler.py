"""The scheduler: who runs, in what order, within which budgets; and nothing ever waits for ever."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knockon.engine.pages import PagePool
from knockon.engine.request import Phase, Request
from knockon.engine.sampling_params import SamplingParams
from knockon.engine.scheduler import Scheduler
from knockon.engine.step import Step
from knockon.errors import Refused

PAGE = 4


def scheduler(
    pages: int = 101,
    batch: int = 4,
    chunk: int = 8,
    block: int = 4,
    max_length: int = 64,
    prefix_cache: bool = False,
) -> Scheduler:
    return Scheduler(PagePool(pages, PAGE, prefix_cache), batch, chunk, block, max_length)


def request(name: str, prompt: int, cap: int = 8, token: int | None = None) -> Request:
    tokens = [hash(name) % 1000 if token is None else token] * prompt
    params = SamplingParams(max_tokens=cap, presence_penalty=1.0 if token == 1 else 0.0)
    return Request(name, tokens, params, seed=0)


def advance(s: Scheduler, step: Step, gained: int = 1) -> None:
    """What the engine does with a step: every decode gains tokens, up to the request's end."""
    for chunk in step.prefill:
        r = chunk.request
        assert chunk.start == r.length and chunk.count > 0
        assert s.pool.pages_for(r.length + chunk.count) <= len(r.pages)
        r.length += chunk.count
        s.pool.register(r.tokens[: r.length], r.pages, r.registered)
        r.registered = max(r.registered, r.length // PAGE)
        if r.length == r.prefill_end:
            r.phase = Phase.DECODE
            if not r.output:
                r.tokens.append(1)
                finish_at_cap(s, r)
    for r in step.decode:
        assert r.length == len(r.tokens) - 1
        assert len(r.pages) * PAGE >= r.length + s.block_rows
        room = min(r.params.max_tokens - len(r.output), s.max_length - len(r.tokens))
        kept = min(gained, room)
        r.length += gained
        r.tokens += [1] * kept
        finish_at_cap(s, r)


def finish_at_cap(s: Scheduler, r: Request) -> None:
    if len(r.output) >= r.params.max_tokens or len(r.tokens) >= s.max_length:
        s.finish(r)


def test_a_long_prompt_is_cut_into_chunks() -> None:
    s = scheduler(chunk=8)
    r = request("a", 20)
    s.add(r)
    counts = []
    while r.phase is not Phase.DECODE:
        step = s.schedule()
        counts += [chunk.count for chunk in step.prefill]
        assert [chunk.last for chunk in step.prefill] == [sum(counts) == 20]
        advance(s, step)
    assert counts == [8, 8, 4]


def test_the_chunk_budget_is_shared_in_order_of_arrival() -> None:
    s = scheduler(chunk=8)
    for name, prompt in (("a", 5), ("b", 2), ("c", 9)):
        s.add(request(name, prompt))
    step = s.schedule()
    assert [(c.request.id, c.count) for c in step.prefill] == [("a", 5), ("b", 2), ("c", 1)]
    assert step.decode == []
    advance(s, step)
    step = s.schedule()
    assert [(c.request.id, c.start, c.count) for c in step.prefill] == [("c", 1, 8)]
    assert [r.id for r in step.decode] == ["a", "b"]


def test_no_more_requests_run_than_the_batch_holds() -> None:
    s = scheduler(batch=2)
    for name in "abc":
        s.add(request(name, 3, cap=2))
    step = s.schedule()
    assert [c.request.id for c in step.prefill] == ["a", "b"]
    assert [r.id for r in s.running] == ["a", "b"]
    advance(s, step)
    while s.has_unfinished:
        advance(s, s.schedule())
    assert s.running == []
    assert s.pool.available == s.pool.usable


def test_a_request_waits_for_pages_and_nobody_overtakes_it() -> None:
    s = scheduler(pages=9, batch=4, max_length=30)
    s.add(request("a", 12, cap=2))  # 4 pages with its block
    s.add(request("b", 16, cap=2))  # 5: does not fit beside it
    s.add(request("c", 1, cap=2))  # would fit, and waits its turn
    step = s.schedule()
    assert [r.id for r in s.running] == ["a"]
    while "a" in [r.id for r in s.running]:
        advance(s, step)
        step = s.schedule()
    assert [r.id for r in s.running] == ["b", "c"]


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    s = scheduler(pages=9, batch=3, chunk=64, max_length=28)
    old, young, last = request("old", 8, cap=12), request("young", 8, cap=12), request("last", 8)
    s.add(old)
    s.add(young)
    advance(s, s.schedule())
    s.add(last)
    kept: list[int] = []
    stay = young.stay
    for _ in range(12):
        step = s.schedule()
        if young.preemptions:
            break
        advance(s, step)
        kept = list(young.tokens)
    assert young.preemptions == 1 and old.preemptions == 0
    assert young.pages == [] and young not in s.running and young.length == 0
    assert young.tokens == kept
    assert [r.id for r in s.waiting] == ["young", "last"]
    while s.has_unfinished:
        advance(s, step)
        step = s.schedule()
    assert len(young.output) == 12 and len(last.output) == 8
    assert young.stay > stay


def test_a_resumed_request_prefills_all_but_its_bonus_token() -> None:
    s = scheduler(chunk=64)
    r = request("a", 6)
    s.add(r)
    for _ in range(3):
        advance(s, s.schedule())
    s.preempt(r)
    step = s.schedule()
    assert [(c.start, c.count, c.last) for c in step.prefill] == [(0, len(r.tokens) - 1, True)]


def test_a_cached_prefix_is_not_prefilled_but_for_its_last_token() -> None:
    s = scheduler(prefix_cache=True, chunk=64)
    s.add(request("a", 9, cap=1, token=7))
    advance(s, s.schedule())
    assert not s.has_unfinished
    for prompt, cached in ((9, 8), (8, 4), (4, 0), (3, 0)):
        r = request(f"again {prompt}", prompt, cap=1, token=7)
        s.add(r)
        step = s.schedule()
        assert [(c.start, c.count) for c in step.prefill] == [(cached, prompt - cached)]
        assert r.cached_tokens == cached
        advance(s, step)


def test_a_resumed_request_has_found_no_more_of_its_prompt_in_the_cache() -> None:
    s = scheduler(prefix_cache=True, chunk=64)
    s.add(request("before", 5, cap=1, token=7))
    advance(s, s.schedule())
    r = request("a", 9, cap=30, token=7)
    s.add(r)
    for _ in range(12):
        advance(s, s.schedule())
    s.pool.register(r.tokens, r.pages, r.registered, r.length)  # what it has generated, too
    s.preempt(r)
    s.schedule()
    assert r.length > len(r.prompt) and r.cached_tokens == 4


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode"])
def test_an_abort_gives_everything_back(when: str) -> None:
    s = scheduler(chunk=8)
    r = request("a", 12)
    s.add(r)
    if when != "waiting":
        advance(s, s.schedule())
    if when == "decode":
        advance(s, s.schedule())
        advance(s, s.schedule())
    assert r.phase.value == when
    assert s.abort("a") is r
    assert s.abort("a") is None
    assert not s.has_unfinished
    assert s.pool.available == s.pool.usable
    assert s.running == []
    assert s.schedule() == Step([], [])


def test_what_could_never_fit_is_refused() -> None:
    s = scheduler(pages=9, max_length=40)  # 32 positions
    with pytest.raises(Refused, match=r"prompt length: found 40, wanted at most 39"):
        s.add(request("a", 40))
    with pytest.raises(Refused, match=r"found 30, wanted at most 28 positions of KV memory"):
        s.add(request("a", 20, cap=10))
    s.add(request("a", 20, cap=8))
    assert [r.id for r in s.waiting] == ["a"]


@given(
    pages=st.integers(5, 14),
    block=st.integers(1, 6),
    batch=st.integers(1, 4),
    chunk=st.integers(1, 9),
    prefix_cache=st.booleans(),
    seed=st.integers(0, 1 << 32),
)
@settings(max_examples=150)
def test_random_traffic_ends_with_every_token_made_and_every_page_back(
    pages: int, block: int, batch: int, chunk: int, prefix_cache: bool, seed: int
) -> None:
    rng = random.Random(seed)
    s = scheduler(pages, batch, chunk, block, (pages - 1) * PAGE - block, prefix_cache)
    longest = rng.choice([5, s.max_length - 1])  # short prompts with long outputs get preempted
    coming = [
        request(str(i), rng.randint(1, min(longest, s.max_length - 1)), rng.randint(1, 40), i % 2)
        for i in range(rng.randint(1, 12))
    ]
    everyone = list(coming)
    aborted = set()
    for _ in range(2000):
        if coming and rng.random() < 0.5:
            s.add(coming.pop(0))
        if not s.has_unfinished and not coming:
            break
        oldest = s.running[0] if s.running else None
        step = s.schedule()
        assert sum(each.count for each in step.prefill) <= s.prefill_chunk
        assert len(s.running) <= s.max_batch_size
        if s.has_unfinished:
            assert step.prefill or step.decode, "work is waiting and none is done"
        if oldest is not None:
            assert s.running and s.running[0] is oldest, "the oldest must never be preempted"
        assert s.with_history == sum(r.params.needs_history for r in s.running)
        assert len({r.stay for r in s.running}) == len(s.running)
        held = [page for r in s.running for page in r.pages]
        if not s.pool.prefix_cache:
            assert len(held) == len(set(held))
        advance(s, step, gained=rng.randint(1, block))
        if s.running and rng.random() < 0.05:
            aborted.add(s.running[-1].id)
            s.abort(s.running[-1].id)
    assert not s.has_unfinished and not coming
    assert s.pool.available == s.pool.usable
    for r in everyone:
        assert r.phase is Phase.FINISHED
        if r.id not in aborted:
            assert len(r.output) == min(r.params.max_tokens, s.max_length - len(r.prompt))


def test_a_batch_larger_than_the_pages_costs_no_memory() -> None:
    s = scheduler(pages=11, batch=10**12)
    for name in "abc":
        s.add(request(name, 4))
    assert len(s.schedule().prefill) > 0
    assert [r.id for r in s.running] == ["a", "b", "c"]
