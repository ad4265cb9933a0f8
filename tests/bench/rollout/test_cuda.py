"""The benchmark on GPUs: captured blocks replay what eager ones propose."""

from __future__ import annotations

import pytest
import torch

from knockon.bench.replay import Graphed, mean_ms
from knockon.bench.rollout.checks import B_IS_C, GRAPH_IS_EAGER, RANKS_AGREE
from knockon.bench.rollout.rank import lone_rank
from knockon.bench.rollout.ranks import ranks_for
from knockon.bench.rollout.report import RolloutReport
from knockon.bench.rollout.run import measure
from knockon.bench.rollout.settings import settle
from knockon.bench.rollout.variants import Variant

pytestmark = pytest.mark.gpu


def run(**options: object) -> RolloutReport:
    settings = settle(shape="tiny", device="cuda", rounds=2, replays=3, **options)
    with ranks_for(settings) as ranks:
        return measure(settings, ranks)


def test_a_replay_reads_what_the_buffers_hold_now():
    x = torch.zeros(8, device="cuda")
    run = Graphed(lambda: x * 2)
    for value in (1.0, 5.0):
        x.fill_(value)
        assert torch.equal(run(), torch.full((8,), 2 * value, device="cuda"))
    assert mean_ms(run, 10, x.device) > 0


def test_graphs_of_every_stage_propose_as_eager_calls():
    report = run(batches=(1, 8, 64))
    assert report.implementations == ("plain", "fused")
    # A, and B and C twice; B against C twice.
    assert 2 * report.checked[GRAPH_IS_EAGER] == 5 * report.checked[B_IS_C]
    assert report.checked[B_IS_C] >= 2 * 1095
    assert all(m.extra_bytes > 0 and m.ms > 0 for m in report.measurements)
    assert "CUDA graph replays" in report.method and "CPU" not in report.title


def test_the_memory_of_a_stage_does_not_depend_on_what_ran_before():
    rank = lone_rank(settle(shape="tiny", device="cuda", batches=(8,)))
    rank.open_batch(8)
    variants = [Variant("C", "fused"), Variant("base"), Variant("A")]
    first, second = ([rank.prepare(v).extra_bytes for v in variants] for _ in range(2))
    # The allocator may hand out a block that is a little larger; a workspace is 32 MiB.
    assert second == pytest.approx(first, abs=8 << 20)


def test_graphs_of_an_fp8_head_propose_as_eager_calls():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 products")
    report = run(batches=(1, 8, 64), stages=("base", "C"), draft_head_dtype="fp8")
    assert [m.variant.label for m in report.measurements[:5]] == [
        *("base", "C", "fused C"),
        *("fp8 base", "fp8 fused C"),
    ]
    assert report.checked[GRAPH_IS_EAGER] >= 3 * 1095


def test_one_rank_of_two_captures_its_local_copies():
    report = run(batches=(1, 8), one_rank_of=2)
    assert [sum(m.collectives.values()) for m in report.measurements] == [0, 1, 1, 2, 1, 2] * 2
    assert report.checked[GRAPH_IS_EAGER] >= 5 * 1095


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_ranks_on_gpus_agree_and_capture_their_collectives():
    report = run(batches=(1, 8, 64), tp_size=2)
    assert report.checked[B_IS_C] >= 2 * 1095
    assert 2 * report.checked[RANKS_AGREE] == 5 * report.checked[B_IS_C]
    assert report.facts.collectives_by.startswith("NCCL")
