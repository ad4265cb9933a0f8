"""Callers that share one LLM each get their own output, and none waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from knockon.engine.llm import LLM
from knockon.engine.sampling import SamplingBatch
from knockon.errors import Refused
from tests.engine.generation import GREEDY, TinyShelf, load, target_only, tokens

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def llm(tiny: TinyShelf) -> Iterator[LLM]:
    with load(tiny.target(), tiny.drafter("domino")) as loaded:
        yield loaded


def finish(llm: LLM, request_id: str) -> list[int]:
    """What steps report of one request until it ends."""
    gained: list[int] = []
    while True:
        for output in llm.step():
            if output.request_id == request_id:
                gained += output.token_ids
                if output.finished is not None:
                    assert output.finished.token_ids == gained
                    return gained


@pytest.mark.parametrize("caller", ["generate", "stream"])
def test_what_was_queued_gains_under_another_call_and_is_reported(
    llm: LLM, tiny: TinyShelf, caller: str
) -> None:
    expected = tokens(target_only(tiny.target(), PROMPTS))
    queued = llm.add(PROMPTS[0], GREEDY)
    if caller == "generate":
        assert tokens(llm.generate(PROMPTS[1:], GREEDY)) == expected[1:]
    else:
        streamed = [t for output in llm.stream(PROMPTS[1], GREEDY) for t in output.token_ids]
        assert streamed == expected[1]
    assert finish(llm, queued) == expected[0]


def test_interleaved_streams_and_steps_each_get_their_own(llm: LLM, tiny: TinyShelf) -> None:
    expected = tokens(target_only(tiny.target(), PROMPTS[:2]))
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    gained: list[list[int]] = [[], []]
    while sum(map(len, gained)) < 2 * GREEDY.max_tokens:
        for i, stream in enumerate(streams):
            output = next(stream, None)
            gained[i] += output.token_ids if output is not None else []
        assert llm.step() == []
    assert gained == expected


def test_threads_share_one_engine(llm: LLM, tiny: TinyShelf) -> None:
    expected = tokens(target_only(tiny.target(), PROMPTS))
    found: dict[int, list[int]] = {}

    def serve(i: int) -> None:
        found[i] = llm.generate([PROMPTS[i]], GREEDY)[0].token_ids

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert [found.get(i) for i in range(len(PROMPTS))] == expected


def test_a_stream_aborted_elsewhere_ends_with_that_result(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], replace(GREEDY, max_tokens=300))
    first = next(stream)
    result = llm.abort(first.request_id)
    assert result is not None
    last = list(stream)[-1]
    assert last.finished == result
    assert result.finish_reason == "abort"


def test_generate_returns_what_was_aborted_elsewhere(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llm._engine
    assert engine is not None
    step, taken = engine.step, 0

    def abort_the_oldest() -> Any:
        nonlocal taken
        taken += 1
        if taken == 4:
            assert llm.abort(engine.scheduler.running[0].id) is not None
        return step()

    monkeypatch.setattr(engine, "step", abort_the_oldest)
    outputs = llm.generate(PROMPTS[:2], replace(GREEDY, max_tokens=64))
    assert [output.finish_reason for output in outputs] == ["abort", "length"]


def test_an_interrupt_leaves_the_engine_usable_and_others_exact(
    llm: LLM, tiny: TinyShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    penalised = replace(GREEDY, frequency_penalty=0.7)
    expected = tokens(target_only(tiny.target(), PROMPTS, penalised))
    queued = llm.add(PROMPTS[0], penalised)
    first = [llm.step() for _ in range(3)]
    record = SamplingBatch.record

    def interrupted(*args: Any) -> None:
        record(*args)
        raise KeyboardInterrupt  # counted, and never given to anyone

    with monkeypatch.context() as patch:
        patch.setattr(SamplingBatch, "record", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.step()
    gained = [t for outputs in first for output in outputs for t in output.token_ids]
    while len(gained) < GREEDY.max_tokens:
        gained += [t for o in llm.step() if o.request_id == queued for t in o.token_ids]
    assert gained == expected[0]
    assert tokens(llm.generate(PROMPTS, penalised)) == expected


def test_a_request_that_is_not_streamed_is_told_once_and_whole(llm: LLM, tiny: TinyShelf) -> None:
    engine = llm._engine
    assert engine is not None
    for name, stream in (("whole", False), ("in pieces", True)):
        engine.add(name, PROMPTS[0], GREEDY, seed=0, stream=stream)
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    told = [output for output in outputs if output.request_id == "whole"]
    pieces = [output for output in outputs if output.request_id == "in pieces"]
    (only,) = told
    assert only.finished is not None and pieces[-1].finished is not None
    assert only.token_ids == [token for output in pieces for token in output.token_ids]
    assert only.text == "".join(output.text for output in pieces) == only.finished.text
    assert only.finished.text == pieces[-1].finished.text
    assert only.finished.metrics.accept_lengths == pieces[-1].finished.metrics.accept_lengths


def test_a_closed_llm_refuses_and_closes_again(tiny: TinyShelf) -> None:
    for ranks in (1, 2):
        llm = load(tiny.target(), tp_size=ranks)
        stream = llm.stream(PROMPTS[0], GREEDY)
        next(stream)
        llm.close()
        llm.close()
        stream.close()
        with pytest.raises(Refused, match="LLM: found 'closed'"):
            llm.generate([PROMPTS[0]], GREEDY)


def test_a_path_may_be_a_path(tiny: TinyShelf) -> None:
    with LLM(Path(tiny.target()), dtype="float32") as llm:
        assert llm.generate([PROMPTS[0]], replace(GREEDY, max_tokens=2))
