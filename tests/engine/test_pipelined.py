"""Steps launched before the last one's tokens are read give what steps run to their end give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from knockon.engine import device_state, pipelined
from knockon.engine.device_state import upload
from knockon.engine.engine import Engine
from knockon.engine.flight import PipelinedFlight
from knockon.engine.graphs import PrefillKey, StepKey
from knockon.engine.llm import LLM
from knockon.engine.pipelined import PipelinedRunner
from knockon.engine.prefill_batch import alike
from knockon.engine.request import Request
from knockon.engine.sampling_params import SamplingParams
from knockon.engine.step import PrefillChunk
from tests.engine.generation import (
    GREEDY,
    TinyShelf,
    accept_lengths,
    check_same,
    generate,
    load,
    mean_accept_length,
    random_prompts,
    with_seed,
)

PROMPTS = random_prompts(9)
DRAFTS = (None, "dflash", "domino", "domino-shifted", "mtp")
SAMPLED = SamplingParams(
    temperature=0.9, top_p=0.9, top_k=50, min_p=0.02, max_tokens=30, ignore_eos=True
)


def both(
    model: Path, draft: Path | None, params: Any = GREEDY, prompts: Any = PROMPTS, **settings: Any
) -> tuple[Any, Any]:
    """The same requests with steps run to their end, and with steps in flight."""
    plain = generate(model, draft, prompts, params, **settings)
    return plain, generate(model, draft, prompts, params, overlap_schedule=True, **settings)


@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_requests_that_join_and_leave(tiny: TinyShelf, draft: str | None) -> None:
    params = [replace(GREEDY, max_tokens=8 + 5 * i) for i in range(len(PROMPTS))]
    drafter = tiny.drafter(draft) if draft else None
    plain, pipelined = both(tiny.target(), drafter, params, max_batch_size=4, prefill_chunk=40)
    check_same(plain, pipelined)
    if draft == "domino":
        assert mean_accept_length(pipelined) > 1.2


def test_seeded_draws_and_stops_and_penalties_and_logprobs_together(tiny: TinyShelf) -> None:
    params = [with_seed(SAMPLED, seed) for seed in range(len(PROMPTS))]
    params[1] = replace(params[1], repetition_penalty=1.3, frequency_penalty=0.4)
    params[2] = replace(params[2], logprobs=3)
    params[3] = replace(GREEDY, logprobs=2, max_tokens=9)
    params[4] = replace(params[4], ignore_eos=False, stop_token_ids=list(range(0, 300, 7)))
    params[5] = replace(params[5], bad_words=["a", "the"])
    params[6] = replace(params[6], top_k=0, top_p=1.0)
    plain, pipelined = both(tiny.target(), tiny.drafter("domino"), params, max_batch_size=4)
    check_same(plain, pipelined)
    for index in (2, 3):
        ours, theirs = plain[index].logprobs, pipelined[index].logprobs
        assert [each.token_id for each in ours] == [each.token_id for each in theirs]
        assert [each.logprob for each in ours] == pytest.approx([e.logprob for e in theirs])


@pytest.mark.parametrize("drafter", ["domino", "mtp"])
def test_pages_that_run_out_and_prefixes_met_again(tiny: TinyShelf, drafter: str) -> None:
    shared = random_prompts(1, low=40, high=41)[0]
    prompts = [shared + prompt for prompt in PROMPTS]
    settings = {"page_size": 4, "max_batch_size": 4, "kv_memory": 5 << 20}
    model, draft = tiny.target(), tiny.drafter(drafter)
    wide = generate(model, draft, prompts, page_size=4)
    with load(model, draft, overlap_schedule=True, **settings) as llm:
        per_page = llm._engine.scheduler.pool  # type: ignore[union-attr]
        bytes_a_page = (5 << 20) // per_page.num_pages
    settings["kv_memory"] = bytes_a_page * 70
    with load(model, draft, overlap_schedule=True, **settings) as llm:
        first = llm.generate(prompts, GREEDY)
        again = llm.generate(prompts[:2], GREEDY)
    assert sum(output.metrics.preemptions for output in first) > 0
    assert again[0].metrics.cached_tokens >= 40
    check_same(wide, first)
    check_same(first[:2], again)


def test_an_aborted_request_gets_nothing_more_and_others_go_on(tiny: TinyShelf) -> None:
    model, draft = tiny.target(), tiny.drafter("domino")
    alone = generate(model, draft, PROMPTS[:3])
    with load(model, draft, overlap_schedule=True) as llm:
        ids = [llm.add(prompt, GREEDY) for prompt in PROMPTS[:3]]
        results = {}
        for _ in range(4):
            llm.step()
        aborted = llm.abort(ids[1])
        assert aborted is not None and aborted.finish_reason == "abort"
        while len(results) < 2:
            for output in llm.step():
                assert output.request_id != ids[1]
                if output.finished is not None:
                    results[output.request_id] = output.finished
        # The slot and the pages of the aborted one serve another, while a step is in flight.
        (again,) = llm.generate([PROMPTS[1]], GREEDY)
    check_same([alone[0], alone[1], alone[2]], [results[ids[0]], again, results[ids[2]]])
    assert alone[1].token_ids[: len(aborted.token_ids)] == aborted.token_ids


def interrupt_once(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Let ``owner.name`` do its work the next time, and be interrupted then."""
    original = getattr(owner, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        patch.setattr(owner, name, original)
        original(*args, **kwargs)
        raise KeyboardInterrupt

    patch.setattr(owner, name, interrupted)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (PipelinedFlight, "land"),
        (pipelined, "to_host"),
        (Engine, "_take_off"),
        (Engine, "_take_in"),
    ],
)
@pytest.mark.parametrize("drafted", (False, True))
def test_an_interrupt_anywhere_in_a_step_costs_no_token(
    tiny: TinyShelf, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, drafted: bool
) -> None:
    model = tiny.target()
    draft = tiny.drafter("domino") if drafted else None
    params = [replace(GREEDY, max_tokens=n) for n in (5, 24, 24)]
    expected = generate(model, draft, PROMPTS[:3], params)
    with load(model, draft, overlap_schedule=True) as llm:
        ids = [llm.add(p, each) for p, each in zip(PROMPTS[:3], params, strict=True)]
        found: dict[str, list[int]] = {each: [] for each in ids}
        ended = {}
        for step in range(400):
            if step % 6 == 5:  # seldom enough that something lands in between
                interrupt_once(monkeypatch, owner, name)
            try:
                outputs = llm.step()
            except KeyboardInterrupt:
                continue
            for output in outputs:
                found[output.request_id] += output.token_ids
                if output.finished is not None:
                    ended[output.request_id] = output.finished
            if len(ended) == 3:
                break
        monkeypatch.undo()
        engine = llm._engine
        assert engine is not None
        assert engine.scheduler.pool.available == engine.scheduler.pool.usable
    for each, wanted in zip(ids, expected, strict=True):
        assert ended[each].token_ids == wanted.token_ids
        assert found[each] == wanted.token_ids


def test_a_request_is_not_run_beyond_what_its_cap_makes_certain(tiny: TinyShelf) -> None:
    with load(tiny.target(), overlap_schedule=True) as llm:
        (output,) = llm.generate([PROMPTS[0]], replace(GREEDY, max_tokens=5))
        assert len(output.token_ids) == 5
        assert llm.metrics().steps == 4


@pytest.mark.parametrize("bucket", [None, 4])
def test_a_batch_that_stays_the_same_is_uploaded_once(
    tiny: TinyShelf, monkeypatch: pytest.MonkeyPatch, bucket: int | None
) -> None:
    params = [replace(GREEDY, max_tokens=12), GREEDY, GREEDY]
    expected = generate(tiny.target(), tiny.drafter("domino"), PROMPTS[:3], params)
    uploads = 0

    def counting(*args: Any) -> torch.Tensor:
        nonlocal uploads
        uploads += 1
        return upload(*args)

    for module in (pipelined, device_state):
        monkeypatch.setattr(module, "upload", counting)
    # Pages so large that no request needs a second one.
    settings = {"page_size": 128, "overlap_schedule": True, "max_batch_size": 4}
    with load(tiny.target(), tiny.drafter("domino"), **settings) as llm:
        engine = llm._engine
        assert engine is not None
        runner = engine.runner
        assert isinstance(runner, PipelinedRunner)
        if bucket is not None:  # what a graph does, without one
            runner._slots[bucket] = torch.full((bucket,), runner.state.idle)

            def graph(key: StepKey) -> SimpleNamespace:
                slots = runner._slots[key.bucket]
                return SimpleNamespace(replay=lambda: runner._step(slots, key.width, key.kind)[0])

            monkeypatch.setattr(runner, "_graph", graph)
        for name, (prompt, each) in enumerate(zip(PROMPTS[:3], params, strict=True)):
            engine.add(str(name), prompt, each, seed=0, stream=False)
        found, batch = {}, 0
        while engine.has_unfinished:
            before, uploads = batch, 0
            decoding = engine.scheduler.decoding().requests
            for output in engine.step():
                found[int(output.request_id)] = output.finished
            batch = len(decoding)
            if batch and batch == before:
                assert uploads == 0
            elif batch:
                assert uploads > 0
    check_same(expected, [found[i] for i in range(3)])


class ReplayedByHand:
    """Stands for :class:`Graphs` on a CPU: replays run again what a graph would have captured."""

    def __init__(self) -> None:
        self.made: dict[object, SimpleNamespace] = {}

    def find(self, key: object) -> SimpleNamespace | None:
        return self.made.get(key)

    def capture(self, key: object, run: Any) -> SimpleNamespace:
        run()
        self.made[key] = SimpleNamespace(replay=run)
        return self.made[key]


@pytest.mark.parametrize(
    ("drafter", "buckets"), [("domino", (1, 2, 4)), ("mtp", (1, 2, 4)), ("domino", (1, 2))]
)
def test_what_graphs_run_leaves_no_trace_of_padding_and_capture(
    tiny: TinyShelf, drafter: str, buckets: tuple[int, ...]
) -> None:
    model, draft = tiny.target(), tiny.drafter(drafter)
    params = [with_seed(SAMPLED, seed) if seed % 2 else GREEDY for seed in range(len(PROMPTS))]
    params = [replace(each, speculation=i % 3 != 0) for i, each in enumerate(params)]
    expected = generate(model, draft, PROMPTS, params, max_batch_size=4)
    settings = {"max_batch_size": 4, "overlap_schedule": True, "prefill_chunk": 64}
    with load(model, draft, **settings) as llm:
        runner = llm._engine.runner  # type: ignore[union-attr]
        assert isinstance(runner, PipelinedRunner)
        graphs = ReplayedByHand()
        runner.graphs = graphs  # type: ignore[assignment]
        for bucket in buckets:
            runner._slots[bucket] = torch.full((bucket,), runner.state.idle)
        runner._most_prefill_rows = 64
        runner.capture([runner.drafter.block_size])  # type: ignore[union-attr]
        found = llm.generate(PROMPTS, params)
        idle = runner.state.idle
        assert runner.state.lengths[idle] == 0
        assert not runner.state.page_table[idle].any()
    check_same(expected, found)
    kinds = {type(key) for key in graphs.made}
    assert kinds == {StepKey, PrefillKey}
    steps = [key for key in graphs.made if isinstance(key, StepKey)]
    assert {key.bucket for key in steps} == set(buckets)  # four at once run without, if need be
    assert any(key.width == 1 for key in steps)  # once nobody in a step speculates


def test_clients_of_many_filters_make_few_graphs(
    tiny: TinyShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    filters: list[dict[str, Any]] = [{"top_k": k, "top_p": 1.0} for k in (1, 2, 5, 17, 130)]
    filters += [{"top_p": p, "top_k": 0} for p in (0.3, 0.9)]
    filters += [{"top_k": 0, "top_p": 1.0, "min_p": m} for m in (0.0, 0.2)]
    base = replace(SAMPLED, min_p=0.0, max_tokens=6)
    params = [replace(with_seed(base, i), **each) for i, each in enumerate(filters)]
    model, draft = tiny.target(), tiny.drafter("domino")
    expected = generate(model, draft, PROMPTS, params, max_batch_size=1)
    with load(model, draft, max_batch_size=1, overlap_schedule=True) as llm:
        runner = llm._engine.runner  # type: ignore[union-attr]
        assert isinstance(runner, PipelinedRunner)
        graphs = ReplayedByHand()
        monkeypatch.setattr(runner, "graphs", graphs)
        runner._slots[1] = torch.full((1,), runner.state.idle)
        found = llm.generate(PROMPTS, params)
    check_same(expected, found)
    names = [str(key) for key in graphs.made]
    assert sorted(name.partition(", ")[2].partition(", ")[2] for name in names) == [
        "drawn by min-p",
        "drawn by temperature",
        "drawn by top-k",
        "drawn by top-p",
    ]


@pytest.mark.parametrize("drafter", ["domino", "mtp"])
def test_two_ranks_pipeline_alike(tiny: TinyShelf, drafter: str) -> None:
    model, draft = tiny.target(), tiny.drafter(drafter)
    alone = generate(model, draft, PROMPTS[:4])
    two = generate(model, draft, PROMPTS[:4], tp_size=2, overlap_schedule=True)
    assert [o.token_ids for o in alone] == [o.token_ids for o in two]
    assert accept_lengths(alone) == accept_lengths(two)


def test_chunks_of_like_length_are_run_together() -> None:
    def chunk(count: int) -> PrefillChunk:
        return PrefillChunk(Request(str(count), [0] * count, GREEDY, 0), 0, count)

    groups = alike([chunk(n) for n in (3, 100, 60, 7, 49, 5)])
    assert [[c.count for c in group] for group in groups] == [[100, 60], [49], [7, 5], [3]]


def test_the_default_on_a_cpu_runs_steps_to_their_end(tiny: TinyShelf) -> None:
    with LLM(str(tiny.target()), device="cpu") as llm:
        assert llm.config.overlap_schedule is False
        assert llm.config.attention_backend == "torch"


def test_a_rehearsal_of_several_prompts_leaves_no_trace(tiny: TinyShelf) -> None:
    with LLM(
        str(tiny.target()), str(tiny.drafter("domino")), overlap_schedule=True, dtype="float32"
    ) as llm:
        before = llm.generate(PROMPTS, GREEDY)
        assert llm.flush_cache() > 0
        assert llm._engine is not None and isinstance(llm._engine.runner, PipelinedRunner)
        llm._engine.runner.rehearse(3, 40, 4)
        check_same(before, llm.generate(PROMPTS, GREEDY))
