"""An interrupt while the ranks work loses nothing that they did."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from knockon.engine.llm import LLM
from knockon.parallel.pending_call import PendingCall
from tests.engine.generation import GREEDY, TinyShelf, load, random_prompts, target_only, tokens

PROMPTS = random_prompts(3, seed=41, high=20)
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def llm(tiny: TinyShelf) -> Iterator[LLM]:
    with load(tiny.target(), tiny.drafter("domino"), tp_size=2) as loaded:
        yield loaded


@pytest.fixture
def expected(tiny: TinyShelf) -> list[list[int]]:
    return tokens(target_only(tiny.target(), PROMPTS))


def interrupt_every(patch: pytest.MonkeyPatch, count: int) -> None:
    """Interrupt every so many waits for the ranks, before they have answered."""
    result, waits = PendingCall.result, 0

    def waiting(call: PendingCall) -> Any:
        nonlocal waits
        waits += 1
        if waits % count == 0:
            raise KeyboardInterrupt
        return result(call)

    patch.setattr(PendingCall, "result", waiting)


def until_all_end(llm: LLM, count: int) -> dict[str, list[int]]:
    """What steps report of each request, from its first token to its end."""
    found: dict[str, list[int]] = {}
    ended = 0
    while ended < count:
        try:
            outputs = llm.step()
        except KeyboardInterrupt:
            continue
        for output in outputs:
            found.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finished is not None:
                ended += 1
                assert output.finished.token_ids == found[output.request_id]
    return found


def test_what_interrupted_steps_gave_comes_with_the_next(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [llm.add(prompt, GREEDY) for prompt in PROMPTS]
    interrupt_every(monkeypatch, 3)
    found = until_all_end(llm, 3)
    assert [found[request_id] for request_id in ids] == expected


def test_an_interrupted_generate_leaves_others_whole_and_nothing_of_its_own(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    queued = llm.add(PROMPTS[0], GREEDY)
    with monkeypatch.context() as patch:
        interrupt_every(patch, 9)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[1:], GREEDY)
    assert llm.occupancy().running == 1
    assert until_all_end(llm, 1) == {queued: expected[0]}
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected


def test_a_request_whose_adding_is_interrupted_does_not_run_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = PendingCall.result
    with monkeypatch.context() as patch:

        def waiting(call: PendingCall) -> Any:
            patch.setattr(PendingCall, "result", result)
            raise KeyboardInterrupt

        patch.setattr(PendingCall, "result", waiting)
        with pytest.raises(KeyboardInterrupt):
            llm.add(PROMPTS[0], GREEDY)
    occupancy = llm.occupancy()
    assert (occupancy.running, occupancy.waiting) == (0, 0)
    assert llm.step() == []


def test_an_abort_interrupted_is_told_to_whom_it_concerns(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    first = next(stream)
    with monkeypatch.context() as patch:
        interrupt_every(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            llm.abort(first.request_id)
    last = list(stream)[-1].finished
    assert last is not None and last.finish_reason == "abort"
