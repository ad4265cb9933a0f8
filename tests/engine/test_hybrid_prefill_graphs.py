"""Prompts of targets with recurrent layers run as graphs: what eager ones give, tokens and states.

On a CPU graphs are replayed by hand; what a GPU is asked for here needs its kernels for prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from knockon.engine import build_runner, graphs
from knockon.engine.build_runner import most_prefill_rows
from knockon.engine.config import EngineConfig
from knockon.engine.graph_capture import CaptureFailed
from knockon.engine.graphs import ByHand, Captured, PrefillKey, StepKey
from knockon.engine.llm import LLM
from knockon.engine.pipelined import PipelinedRunner
from knockon.engine.request import RequestOutput
from knockon.layers.fla_chunks import fla_obstacle
from tests.engine.generation import GREEDY, TinyShelf, check_same, generate, load, random_prompts
from tests.engine.test_hybrid import SHORT, TARGET, engine_of
from tests.engine.test_hybrid_in_flight import runner_of
from tests.engine.test_pipelined import ReplayedByHand
from tests.reference_speculation import greedy_margin

PROMPTS = [*random_prompts(5), *random_prompts(3, seed=8, low=70, high=140)]
SHARED = random_prompts(1, seed=4, low=41, high=42)[0]
FAMILY = [[*SHARED, *tail[:9]] for tail in random_prompts(4, seed=6, low=9, high=20)]


def by_hand(llm: LLM, most: int = 64) -> ReplayedByHand:
    """Have a CPU's engine run prefills as it would with graphs."""
    runner = runner_of(llm)
    found = ReplayedByHand()
    runner.graphs = found  # type: ignore[assignment]
    runner._most_prefill_rows = most
    runner.capture([])
    return found


def states_of(llm: LLM) -> list[torch.Tensor]:
    """All that recurrent layers keep, of requests and of checkpoints; not the idle slot's."""
    runner = runner_of(llm)
    found = [array for memory in runner._engines.states for array in (memory.state, memory.conv)]
    kept = torch.arange(len(found[0])) != runner.state.idle
    return [array.cpu()[kept].float() for array in found]


def check_states(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    """Hold states to each other: padding moves their last bits alone, of TF32 in the kernels."""
    for ours, theirs in zip(found, wanted, strict=True):
        assert float((ours - theirs).abs().max()) <= 5e-3 * float(theirs.abs().max())


@pytest.mark.parametrize(
    ("settings", "recurrent", "rows"),
    [
        ({"cuda_graph": True}, False, 77),
        ({"cuda_graph": True, "linear_attn_backend": "fla"}, True, 77),
        ({"cuda_graph": True, "linear_attn_backend": "torch"}, True, 0),
        ({"cuda_graph": False, "linear_attn_backend": "fla"}, True, 0),
        ({"cuda_graph": False}, False, 0),
    ],
)
def test_prefills_are_graphs_where_what_takes_prompts_can_be_captured(
    settings: dict[str, Any], recurrent: bool, rows: int
) -> None:
    config = EngineConfig("model", overlap_schedule=True, **settings)
    assert most_prefill_rows(config, 77, recurrent) == rows


@pytest.mark.parametrize("drafter", [None, "domino", "mtp"])
def test_padded_prefills_leave_tokens_and_states_as_they_are(
    tiny: TinyShelf, drafter: str | None
) -> None:
    model = tiny.target(TARGET)
    draft = tiny.drafter(drafter, TARGET) if drafter else None
    params = [replace(GREEDY, max_tokens=6 + 4 * i) for i in range(len(PROMPTS))]
    settings: dict[str, Any] = {"max_batch_size": 4, "prefill_chunk": 160}
    plain = generate(model, draft, PROMPTS, params, **settings)
    with load(model, draft, overlap_schedule=True, **settings) as llm:
        made = by_hand(llm, 160)
        check_same(llm.generate(PROMPTS, params), plain)
    shapes = [key for key in made.made if isinstance(key, PrefillKey)]
    assert {key.requests for key in shapes} >= {1, 2}
    assert any(key.rows == 64 for key in shapes)


def test_checkpoints_are_left_and_gone_on_from(tiny: TinyShelf) -> None:
    model, draft = tiny.target(TARGET), tiny.drafter("mtp", TARGET)
    cold = generate(model, draft, FAMILY, SHORT, prefix_cache=False)
    settings: dict[str, Any] = {"page_size": 4, "max_batch_size": 4, "max_mamba_cache_size": 14}
    found = []
    for graphs_by_hand in (False, True):
        with load(model, draft, overlap_schedule=True, **settings) as llm:
            if graphs_by_hand:
                by_hand(llm)
            warm = [llm.generate([prompt], SHORT)[0] for prompt in FAMILY]
            again = llm.generate([FAMILY[0]], SHORT)[0]
            check_same([*warm, again], [*cold, cold[0]])
            cached = [output.metrics.cached_tokens for output in warm]
            assert [*cached, again.metrics.cached_tokens] == [0, 0, 40, 40, 48]
            found.append(states_of(llm))
    check_states(found[1], found[0])


def test_a_prompt_is_one_forward(tiny: TinyShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is kept of it, and two where it goes through shared pages for their state."""
    forwards: list[int] = []
    original = PipelinedRunner._prefill
    monkeypatch.setattr(
        PipelinedRunner,
        "_prefill",
        lambda self, chunks: forwards.append(len(chunks)) or original(self, chunks),
    )
    with load(tiny.target(TARGET), overlap_schedule=True, page_size=4) as llm:
        counts = []
        for prompt in FAMILY:
            forwards.clear()
            llm.generate([prompt], SHORT)
            counts.append(len(forwards))
        assert llm.occupancy().cached_states > 3
    assert counts == [1, 2, 1, 1]


def test_preempted_prompts_are_computed_again(tiny: TinyShelf) -> None:
    model, draft = tiny.target(TARGET), tiny.drafter("domino", TARGET)
    alone = generate(model, draft, PROMPTS, GREEDY)
    settings: dict[str, Any] = {"page_size": 4, "max_batch_size": 3, "overlap_schedule": True}
    with load(model, draft, kv_memory=250_000, **settings) as llm:
        per_page = 250_000 // engine_of(llm).scheduler.pool.num_pages
    with load(model, draft, kv_memory=per_page * 75, max_model_len=200, **settings) as llm:
        by_hand(llm)
        tight = llm.generate(PROMPTS, GREEDY)
    assert sum(output.metrics.preemptions for output in tight) > 0
    check_same(tight, alone)


def test_a_capture_that_fails_costs_graphs_of_its_kind_and_nothing_else(
    tiny: TinyShelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, draft = tiny.target(TARGET), tiny.drafter("domino", TARGET)
    plain = generate(model, draft, PROMPTS, SHORT, max_batch_size=4)
    capturing, refusals = False, 0
    original = PipelinedRunner._run_rows

    def refused(self: PipelinedRunner, *arguments: Any, **named: Any) -> Any:
        if capturing:
            raise CaptureFailed("RuntimeError: operation not permitted when stream is capturing")
        return original(self, *arguments, **named)

    def record(run: Any, pool: object, device: torch.device) -> tuple[Any, Any]:
        nonlocal capturing, refusals
        capturing = True
        try:
            run()
        except CaptureFailed:
            refusals += 1
            raise
        finally:
            capturing = False
        return SimpleNamespace(replay=run), None

    monkeypatch.setattr(PipelinedRunner, "_run_rows", refused)
    monkeypatch.setattr(graphs, "record", record)
    monkeypatch.setattr(Captured, "replay", lambda self: self._graph.replay())
    monkeypatch.setattr(graphs, "warm_up", lambda run, device: run())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    with load(model, draft, overlap_schedule=True, max_batch_size=4) as llm:
        runner = runner_of(llm)
        runner._most_prefill_rows = 64
        for bucket in (1, 4):
            runner._slots[bucket] = torch.full((bucket,), runner.state.idle)
        runner.capture([runner.drafter.block_size])  # type: ignore[union-attr]
        assert runner.graphs.count == 2
        check_same(llm.generate(PROMPTS, SHORT), plain)
        kinds = {(type(key), type(made)) for key, made in runner.graphs._made.items()}
        assert kinds == {(StepKey, Captured), (PrefillKey, ByHand)}
    assert refusals == 1  # no other prefill was tried
    (warning,) = [each for each in caplog.records if "could not capture" in each.message]
    assert warning.levelname == "WARNING"
    assert "not permitted when stream is capturing" in warning.message
    assert "prompts without a graph" in warning.message


@pytest.fixture
def kernels() -> None:
    """The real package."""
    obstacle = fla_obstacle()
    if obstacle:
        pytest.skip(obstacle)


def on_gpu(
    tiny: TinyShelf, drafter: str | None, prefill_graphs: bool = True, **settings: Any
) -> AbstractContextManager[LLM]:
    """An FP32 engine with graphs of steps, and of prefills or not."""
    draft = tiny.drafter(drafter, TARGET) if drafter else None
    wanted = {
        "device": "cuda",
        "linear_attn_backend": "fla",
        "kv_memory": 64 << 20,
        "max_batch_size": 4,
        **settings,
    }
    with pytest.MonkeyPatch.context() as patch:
        if not prefill_graphs:
            patch.setattr(build_runner, "most_prefill_rows", lambda *_, **__: 0)
        return load(tiny.target(TARGET), draft, **wanted)


def check_tokens(
    tiny: TinyShelf, found: Sequence[RequestOutput], wanted: Sequence[RequestOutput]
) -> None:
    """Hold two runs to the same tokens, whose leads are far beyond what TF32 moves.

    Not to the same accept lengths: a random drafter's own leads are anything.
    """
    model = tiny.target(TARGET)
    for ours, theirs in zip(found, wanted, strict=True):
        if ours.token_ids != theirs.token_ids:
            lead = greedy_margin(model, theirs.prompt_token_ids, theirs.token_ids)
            same = [x == y for x, y in zip(ours.token_ids, theirs.token_ids, strict=False)]
            pytest.fail(f"parted after {same.index(False)} tokens; the smallest lead is {lead:.2g}")


def prefill_graphs_of(llm: LLM) -> list[object]:
    return [
        made for key, made in runner_of(llm).graphs._made.items() if isinstance(key, PrefillKey)
    ]


@pytest.mark.gpu
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("drafter", [None, "domino", "mtp"])
def test_a_gpus_graphs_equal_its_eager_prefills(tiny: TinyShelf, drafter: str | None) -> None:
    """Prompts of mixed lengths, alone and together, met again from their checkpoints."""
    params = [replace(SHORT, max_tokens=8 + 3 * i) for i in range(len(PROMPTS))]
    found, states = [], []
    for prefill_graphs in (False, True):
        with on_gpu(tiny, drafter, prefill_graphs, prefill_chunk=128) as llm:
            outputs = llm.generate(PROMPTS, params)
            outputs += [llm.generate([p], SHORT)[0] for p in [*FAMILY, FAMILY[0], PROMPTS[-1]]]
            made = prefill_graphs_of(llm)
            assert bool(made) == prefill_graphs
            assert all(isinstance(each, Captured) for each in made)
            states.append(states_of(llm))
            found.append(outputs)
    check_tokens(tiny, found[1], found[0])
    cached = [[output.metrics.cached_tokens for output in outputs] for outputs in found]
    assert cached[0] == cached[1] and any(cached[0])
    check_states(states[1], states[0])


@pytest.mark.gpu
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_gpus_graphs_in_16_bits(tiny: TinyShelf, dtype: str) -> None:
    """Tokens may part at ties; the states that one prompt leaves may not be far apart."""
    states = []
    for prefill_graphs in (False, True):
        with on_gpu(tiny, None, prefill_graphs, dtype=dtype, page_size=16) as llm:
            llm.generate([PROMPTS[-1]], replace(GREEDY, max_tokens=1))
            states.append(states_of(llm))
    for ours, theirs in zip(states[1], states[0], strict=True):
        assert theirs.any()
        assert float((ours - theirs).norm()) <= 5e-2 * float(theirs.norm())


@pytest.mark.gpu
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("drafter", ["domino", "mtp"])
def test_a_gpus_graphs_with_preemption_and_few_checkpoints(tiny: TinyShelf, drafter: str) -> None:
    prompts = [*PROMPTS, *FAMILY]
    with on_gpu(tiny, drafter, prefix_cache=False) as llm:
        alone = llm.generate(prompts, GREEDY)
    settings: dict[str, Any] = {"page_size": 4, "max_batch_size": 3, "max_mamba_cache_size": 5}
    with on_gpu(tiny, drafter, kv_memory=250_000, **settings) as llm:
        per_page = 250_000 // engine_of(llm).scheduler.pool.num_pages
    with on_gpu(tiny, drafter, kv_memory=per_page * 75, max_model_len=200, **settings) as llm:
        tight = llm.generate(prompts, GREEDY)
    assert sum(output.metrics.preemptions for output in tight) > 0
    check_tokens(tiny, tight, alone)


@pytest.mark.gpu
@pytest.mark.usefixtures("kernels")
def test_a_gpu_goes_on_where_captures_of_prefills_fail(
    tiny: TinyShelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with on_gpu(tiny, "domino") as llm:
        wanted = llm.generate(PROMPTS, SHORT)
    original = PipelinedRunner._run_rows

    def refused(self: PipelinedRunner, *arguments: Any, **named: Any) -> Any:
        result = original(self, *arguments, **named)
        if torch.cuda.is_current_stream_capturing():
            result[0].sum().item()
        return result

    monkeypatch.setattr(PipelinedRunner, "_run_rows", refused)
    with on_gpu(tiny, "domino") as llm:
        assert {type(each) for each in prefill_graphs_of(llm)} == {ByHand}
        assert runner_of(llm).graphs.count > 0
        check_tokens(tiny, llm.generate(PROMPTS, SHORT), wanted)
    assert caplog.text.count("could not capture") == 1
