"""The benchmark on CPU ranks: what it measures is what it says, on real ranks."""

from __future__ import annotations

import pytest
import torch

from knockon.bench.rollout.checks import B_IS_C, RANKS_AGREE
from knockon.bench.rollout.groups import CountingGroup, OneRankOf
from knockon.bench.rollout.rank import RolloutRank, lone_rank
from knockon.bench.rollout.ranks import ranks_for
from knockon.bench.rollout.report import RolloutReport
from knockon.bench.rollout.run import measure
from knockon.bench.rollout.settings import settle
from knockon.bench.rollout.variants import Variant
from knockon.bench.rollout.weights import random_weights
from knockon.errors import Refused
from knockon.parallel import SingleRank
from knockon.rollout.reference import reference_rollout

CPU = torch.device("cpu")
QUICK = {"device": "cpu", "shape": "tiny", "rounds": 2, "replays": 1, "check_proposals": 90}


def run(**options: object) -> RolloutReport:
    settings = settle(**QUICK | {"batches": (1, 2)} | options)
    with ranks_for(settings) as ranks:
        return measure(settings, ranks)


def test_one_rank_times_every_stage_and_exchanges_nothing():
    lines: list[str] = []
    settings = settle(**QUICK, batches=(1, 3))
    with ranks_for(settings) as ranks:
        report = measure(settings, ranks, done=lines.append)
    assert [(m.batch, m.variant.stage) for m in report.measurements] == [
        (batch, stage) for batch in (1, 3) for stage in ("base", "A", "B", "C")
    ]
    assert len(lines) == 8 and "batch   3  C" in lines[-1]
    for found in report.measurements:
        assert [len(rounds) for rounds in found.rounds_ms] == [2]
        assert found.ms > 0 and not found.collectives and found.extra_bytes is None
    assert report.checked == {B_IS_C: 3 * 4 * 15}
    assert report.facts.gate_table_bytes == 8192 * 3 * 64 * 4
    assert "CPU" in report.title and "CPU" in report.method


def test_two_processes_agree_and_exchange_what_the_stages_say():
    report = run(tp_size=2)
    v, k, steps, width = 8192, 2048, 15, 4
    for found in report.measurements:
        assert len(found.rounds_ms) == 2
        b = found.batch
        gathered = {"all_gather": v * steps * b * width}
        wanted = {
            "base": {},
            "A": gathered,
            "B": gathered,
            # FP32 ranks are FP64, and ids travel beside them; 14 corrected rows are rebuilt
            "C": {"all_gather": 2 * (k + 1) * b * 16, "all_reduce": (steps - 1) * b * k * width},
        }[found.variant.stage]
        assert found.collective_bytes == wanted
        assert found.collectives == dict.fromkeys(wanted, 1)
    assert report.checked == {B_IS_C: 3 * 3 * 15, RANKS_AGREE: 3 * 3 * 3 * 15}
    assert "TP2" in report.title and "rank-maximum" in report.method


@pytest.mark.parametrize("dtype", ("bfloat16", "float64"))
def test_one_rank_of_two_does_a_ranks_work_with_local_copies(dtype):
    report = run(one_rank_of=2, dtype=dtype, batches=(2,))
    assert [sum(m.collectives.values()) for m in report.measurements] == [0, 1, 1, 2]
    assert not report.checked
    size = 2 if dtype == "bfloat16" else 8
    gathered = report.at(2, "B", "plain").collective_bytes["all_gather"]
    assert gathered == 8192 * 15 * 2 * size
    assert "one rank of 2" in report.method


def test_an_fp8_head_is_rolled_out_beside_the_runs_own():
    report = run(draft_head_dtype="fp8", batches=(2,), stages=("base", "C"), tp_size=2)
    assert [m.variant.label for m in report.measurements] == ["base", "C", "fp8 base", "fp8 C"]
    own, fp8 = (report.at(2, "C", "plain", head) for head in ("auto", "fp8"))
    assert own.collectives == fp8.collectives and own.collective_bytes == fp8.collective_bytes
    assert report.facts.fp8_head_bytes == 4096 * (128 + 4)
    assert report.checked == {RANKS_AGREE: 2 * 3 * 2 * 15}


def test_more_ranks_than_gpus_are_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    settings = settle(device="cuda", tp_size=4)
    with pytest.raises(Refused, match="found 4, wanted at most 1"), ranks_for(settings):
        pass


def test_ranks_hold_parts_of_the_same_weights():
    whole = random_weights(settle(**QUICK), 0, CPU)
    settings = settle(**QUICK, tp_size=3)
    parts = [random_weights(settings, rank, CPU) for rank in range(3)]
    held = [part.vocab_rows[: part.shard.num_org] for part in parts]
    assert torch.equal(torch.cat(held), whole.vocab_rows)
    assert all(torch.equal(p.head.correction_out, whole.head.correction_out) for p in parts)


def test_chains_are_lively_and_every_input_is_fresh():
    rank = lone_rank(settle(**QUICK | {"check_proposals": 1095}, batches=(4,)))
    rank.open_batch(4)
    base, corrected = (rank.prepare(Variant(stage)).eager for stage in ("base", "A"))
    assert torch.equal(base[..., 0], corrected[..., 0])  # the prefix row is the plain argmax
    changed = (base[..., 1:] != corrected[..., 1:]).double().mean()
    assert 0.2 < changed < 0.98
    assert len(corrected.unique()) > 0.3 * corrected.numel()


def test_what_is_timed_proposes_the_oracles_chain():
    settings = settle(**QUICK, batches=(2,), dtype="float64")
    rank = RolloutRank(settings, SingleRank(), CPU)
    rank.open_batch(2)
    inputs, weights = rank._opened(), rank._weights
    for stage, pool_size in (("A", 0), ("B", 2048), ("C", 2048)):
        found = rank.prepare(Variant(stage)).eager
        for number, tokens in enumerate(found, start=1):
            inputs.fill(number)
            rows, hidden, bonus = weights.vocab_rows, inputs.draft_hidden, inputs.bonus
            wanted = reference_rollout(weights.head, rows, rows, hidden, bonus, 15, pool_size)
            assert torch.equal(tokens, wanted), stage


def test_stand_ins_copy_and_are_counted():
    group = CountingGroup(OneRankOf(3, rank=1))
    assert (group.size, group.rank) == (3, 1)
    x = torch.arange(4.0)
    out = torch.full((3, 4), -1.0)
    group.all_gather(out, x)
    assert torch.equal(out, x.expand(3, 4))
    group.all_reduce(x)
    group.broadcast(x)
    assert torch.equal(x, torch.arange(4.0))
    assert group.calls == {"all_gather": 1, "all_reduce": 1, "broadcast": 1}
    assert group.bytes == {"all_gather": 48, "all_reduce": 16, "broadcast": 16}
    group.clear()
    assert not group.calls and not group.bytes
    with pytest.raises(Refused, match="rank"):
        OneRankOf(2, rank=2)
