"""Drawing: mixed batches, odd logits, argmax, and independence of a request from its batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from knockon.engine import sampling
from knockon.engine.noise import exponential, fresh_seed, row_keys
from knockon.engine.sampling import (
    DrawKind,
    SamplingBatch,
    SamplingRequest,
    sample,
    sampling_row,
)
from knockon.engine.sampling_params import SamplingParams
from knockon.engine.verify import Accepted, accept
from knockon.rollout import order

NAN, INF = math.nan, math.inf
V, W = 40, 4

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 0.6, "top_k": 3},
    {"temperature": 1.5, "top_p": 0.8},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.01},
    {"repetition_penalty": 1.3},
    {"temperature": 0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"frequency_penalty": -0.5, "top_p": 0.9},
]


def request(index: int, setting: dict[str, Any]) -> SamplingRequest:
    bad_words = [[3], [5, 6]] if index % 2 else []
    return SamplingRequest(
        SamplingParams(**setting), 100 + index, [1, 2, index], [5, index, 5], bad_words
    )


def block(batch: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, W, V, generator=g) * 2
    proposals = torch.randint(0, V, (batch, W - 1), generator=g)
    return logits, proposals, torch.arange(W) + torch.arange(batch)[:, None] * 7


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ([1.0, 3.0, 3.0], 1),
        ([NAN, 1.0, 2.0], 2),
        ([NAN, -INF, -5.0], 2),
        ([-INF, -INF], 0),
        ([NAN, NAN], 0),
        ([-0.0, 0.0, 0.0], 0),
        ([0.0, INF, INF], 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_argmax_takes_the_lowest_of_ties_and_never_nan(
    values: list[float], best: int, dtype: torch.dtype
) -> None:
    row = torch.tensor(values, dtype=dtype)
    assert order.argmax(row).item() == best
    assert order.argmax(row.expand(2, 3, -1)).tolist() == [[best] * 3] * 2
    # Drawn through the engine, greedy alone and greedy beside a sampled request.
    greedy = SamplingRequest(SamplingParams(temperature=0), 0)
    for requests in ([greedy], [greedy, SamplingRequest(SamplingParams(top_p=0.9), 1)]):
        batch = SamplingBatch.build(requests, len(values))
        b = len(requests)
        none = torch.empty(b, 0, dtype=torch.int64)
        drawn = sample(row.expand(b, 1, -1), none, torch.zeros(b, 1, dtype=torch.int64), batch)
        assert drawn[0, 0] == best


def test_ties_in_a_wide_row_go_to_the_lowest_id() -> None:
    row = torch.zeros(3, 100_003)
    row[0, [70_000, 99_999]] = 1
    row[1, [5, 6, 50_000]] = 1
    assert order.argmax(row).tolist() == [70_000, 5, 0]


def test_a_mixed_batch_draws_what_each_request_draws_alone() -> None:
    requests = [request(i, setting) for i, setting in enumerate(SETTINGS)]
    logits, proposals, positions = block(len(requests))
    together = sample(logits, proposals, positions, SamplingBatch.build(requests, V))
    for b, one in enumerate(requests):
        alone = sample(
            logits[b : b + 1],
            proposals[b : b + 1],
            positions[b : b + 1],
            SamplingBatch.build([one], V),
        )
        assert torch.equal(alone[0], together[b]), SETTINGS[b]


@pytest.mark.parametrize("setting", SETTINGS[1:])
def test_setting_the_second_request_only_changes_the_second_only(setting: dict[str, Any]) -> None:
    def draw(second: dict[str, Any], positions_from: int) -> torch.Tensor:
        requests = [
            SamplingRequest(SamplingParams(**s), 7, [1], [2, 5])
            for s in (SETTINGS[0], second, SETTINGS[1])
        ]
        logits, proposals, positions = block(3, positions_from)
        return sample(logits, proposals, positions, SamplingBatch.build(requests, V))

    changed = False
    for seed in range(8):
        plain, other = draw({}, seed), draw(setting, seed)
        assert torch.equal(plain[[0, 2]], other[[0, 2]])
        changed |= not torch.equal(plain[1], other[1])
    assert changed or setting == {}


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request(i, setting) for i, setting in enumerate(SETTINGS)]
    logits, proposals, positions = block(len(requests))
    whole = sample(logits, proposals, positions, SamplingBatch.build(requests, V))
    monkeypatch.setattr(sampling, "_CHUNK_CPU", 3 * V)
    parts = sample(logits, proposals, positions, SamplingBatch.build(requests, V))
    assert torch.equal(whole, parts)


def test_recording_equals_building_anew() -> None:
    requests = [request(i, setting) for i, setting in enumerate(SETTINGS)]
    batch = SamplingBatch.build(requests, V)
    tokens = block(len(requests), 3)[1]
    kept = torch.arange(len(requests)) % (W - 1) + 1
    padded = torch.where(torch.arange(W - 1) < kept[:, None], tokens, -1)
    batch.record(padded, kept)
    anew = SamplingBatch.build(
        [
            r._replace(output_ids=[*r.output_ids, *tokens[b, : kept[b]].tolist()])
            for b, r in enumerate(requests)
        ],
        V,
    )
    logits, proposals, positions = block(len(requests), 4)
    assert torch.equal(
        sample(logits, proposals, positions, batch), sample(logits, proposals, positions, anew)
    )


def test_a_draw_is_gumbel_max_with_the_noise_of_its_seed_and_position() -> None:
    requests = [SamplingRequest(SamplingParams(), seed) for seed in (1, -9)]
    logits, proposals, positions = block(2)
    drawn = sample(logits, proposals, positions, SamplingBatch.build(requests, V))
    for b, seed in enumerate((1, -9)):
        for i in range(W):
            e = exponential(row_keys(torch.tensor([seed]), positions[b, i : i + 1]), V)[0]
            assert drawn[b, i] == (logits[b, i] - e.log()).argmax()


def test_banned_tokens_are_never_drawn_and_nan_neither() -> None:
    logits = torch.zeros(1, 512, 8)
    logits[..., 1:4] = -torch.inf
    logits[..., 5] = torch.nan
    batch = SamplingBatch.build([SamplingRequest(SamplingParams(temperature=5.0), 3)], 8)
    proposals = torch.zeros(1, 511, dtype=torch.int64)
    drawn = sample(logits, proposals, torch.arange(512)[None], batch)
    assert set(drawn.unique().tolist()) == {0, 4, 6, 7}


def test_unseeded_requests_differ_and_seeded_ones_repeat() -> None:
    def draw(seeds: list[int]) -> torch.Tensor:
        requests = [SamplingRequest(SamplingParams(), seed) for seed in seeds]
        positions = torch.arange(32).expand(len(seeds), 32)
        proposals = torch.zeros(len(seeds), 31, dtype=torch.int64)
        batch = SamplingBatch.build(requests, V)
        return sample(torch.zeros(len(seeds), 32, V), proposals, positions, batch)

    rows = draw([fresh_seed() for _ in range(20)])
    assert len({tuple(row) for row in rows.tolist()}) == 20
    assert torch.equal(draw([5, 6])[1], draw([9, 8, 6])[2])


def test_the_host_knows_what_is_off() -> None:
    batch = SamplingBatch.build(
        [SamplingRequest(SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.1), 0)], V
    )
    assert batch.all_greedy and batch.penalties is None and batch.bad_words is None
    assert (batch.max_top_k, batch.any_top_p, batch.any_min_p) == (0, False, False)


def test_whatever_is_asked_for_is_drawn_alike_by_one_of_nine_kinds() -> None:
    draws = [{}, *({"top_k": k} for k in range(1, V)), {"min_p": 0.1}, {"top_p": 0.5}]
    draws += [{"top_k": 2, "top_p": 0.9}, {"min_p": 0.3, "top_p": 0.4}]
    kinds = set()
    for draw in draws:
        requests = [SamplingRequest(SamplingParams(**d), 5) for d in (draw, {"temperature": 0})]
        exact = SamplingBatch.build(requests, V)
        kind = DrawKind.of([sampling_row(r.params, V) for r in requests]).widened()
        kinds.add(kind)
        logits, proposals, positions = block(2)
        drawn = sample(logits, proposals, positions, replace(exact, **kind._asdict()))
        assert torch.equal(drawn, sample(logits, proposals, positions, exact)), draw
    assert len(kinds) == 6
    assert DrawKind.of([]).widened() == DrawKind.of([]) not in kinds


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_captured_in_a_cuda_graph_equals_the_cpu() -> None:
    requests = [request(i, setting) for i, setting in enumerate(SETTINGS)]
    on_cpu, on_gpu = (SamplingBatch.build(requests, V, device) for device in ("cpu", "cuda"))
    static = [tensor.cuda() for tensor in block(len(requests))]

    def step(tensors: list[torch.Tensor], batch: SamplingBatch) -> Accepted:
        logits, proposals, positions = tensors
        result = accept(proposals, sample(logits, proposals, positions, batch))
        batch.record(result.tokens, result.lengths)
        return result

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # warms up on state that is thrown away
        step(static, SamplingBatch.build(requests, V, "cuda"))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static, on_gpu)
    for seed in range(5):
        inputs = list(block(len(requests), seed))
        for tensor, value in zip(static, inputs, strict=True):
            tensor.copy_(value)
        graph.replay()
        expected = step(inputs, on_cpu)
        assert torch.equal(captured.tokens.cpu(), expected.tokens)
        assert torch.equal(captured.lengths.cpu(), expected.lengths)
