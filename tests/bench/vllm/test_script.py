"""benchmarks/vllm_h200.py: which engines it starts, and that one that fails loses nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from knockon.bench.vllm.run import VllmRun
from knockon.bench.vllm.summary import failures, merged
from tests.bench.vllm.test_run import answer
from tests.benchmark_scripts import load_script


@pytest.fixture(scope="module")
def parts() -> ModuleType:
    return load_script("vllm_parts")


@pytest.fixture
def asked(parts, monkeypatch) -> list[list[VllmRun]]:
    """The runs of each engine that was started."""
    kept: list[list[VllmRun]] = []

    def together(runs, folder, environment=None):
        kept.append(list(runs))
        if "bad" in str(runs[0].draft):
            raise RuntimeError("no such drafter")
        return [answer(tokens=[[1, 2]] * len(run.prompts), full_steps=[0.004]) for run in runs]

    monkeypatch.setattr(parts, "run_together", together)
    return kept


@pytest.fixture
def by_hand(parts, monkeypatch) -> None:
    """No checkpoint is read: three chains, all of them alike."""
    monkeypatch.setattr(parts, "rollout_by_hand", lambda *args, **options: None)
    monkeypatch.setattr(parts, "chains_alike", lambda answer, rollout: (3, 3))


def bench(parts: ModuleType, tmp_path: Path, chosen: tuple[str, ...], **changed: Any) -> Any:
    drafters = {"domino": Path("domino"), "target": None, "dflash": Path("dflash")} | changed
    run = VllmRun("target", [[1]] * 40, concurrency=8)
    return parts.Bench(run, drafters, chosen, tmp_path, "cpu", Path("gguf"))


def measure(found: Any) -> dict[str, Any]:
    for name, engine in found.engines().items():
        found.measure(name, engine)
    return json.loads(json.dumps(found.report))


def test_lossless_and_speed_share_an_engine_a_drafter(parts, asked, tmp_path):
    report = measure(bench(parts, tmp_path, ("lossless", "speed")))
    assert list(report["runs"]) == ["domino", "target", "dflash"]
    assert [len(runs) for runs in asked] == [3, 3, 2]
    assert set(asked[1][0].compare) == {"graphs"}
    assert set(report["lossless"]) == {"graphs", "vllm", "answers"}


def test_agreement_alone_runs_nothing_but_eager(parts, asked, tmp_path, by_hand):
    report = measure(bench(parts, tmp_path, ("agreement",)))
    assert list(report["runs"]) == ["domino, eager"]
    assert asked[0][0].record and asked[0][0].eager
    assert report["agreement"]["plain"] == {"same": 3, "of": 3}
    assert "lossless" not in report


def test_with_agreement_the_eager_answers_are_compared_too(parts, asked, tmp_path, by_hand):
    report = measure(bench(parts, tmp_path, ("agreement", "lossless", "speed")))
    assert list(report["runs"]) == ["domino, eager", "domino", "target", "dflash"]
    assert [len(runs) for runs in asked] == [1, 3, 3, 2]
    assert asked[0][0].record and asked[0][0].eager
    assert set(asked[2][0].compare) == {"eager", "graphs"}
    for runs in asked[1:]:
        assert [(r.concurrency, len(r.prompts)) for r in runs[-2:]] == [(1, 4), (8, 32)]
    assert {(r["drafter"], r["concurrency"]) for r in report["speed"]} == {
        (name, c) for name in ("domino", "target", "dflash") for c in (1, 8)
    }
    assert report["speed"][0]["step_ms"] == 4.0
    # 32 answers (in lossless 40) of one token beside the prompt's, twice, in 10 verifications.
    assert report["speed"][1]["kept_length"] == 32 * 2 / 10
    assert {report["lossless"][name]["kept_length"] for name in ("eager", "graphs")} == {8.0}


@pytest.mark.parametrize("split", range(16))
def test_any_parts_may_be_run_apart_from_the_others(
    parts, asked, tmp_path, by_hand, monkeypatch, split
):
    monkeypatch.setattr(parts.Bench, "knockon", lambda self: None)
    all_parts = ("agreement", "lossless", "knockon", "speed", "step")
    ours = tuple(part for bit, part in enumerate(all_parts) if split >> bit & 1)
    theirs = tuple(part for part in all_parts if part not in ours)
    reports = [measure(bench(parts, tmp_path, chosen)) for chosen in (ours, theirs)]
    whole = merged(reports)
    assert {"agreement", "lossless", "speed", "step"} <= set(whole)
    assert len(whole["runs"]) == sum(len(report.get("runs", ())) for report in reports)


def test_a_step_engine_does_all_concurrencies_with_the_same_graphs(parts, asked, tmp_path):
    report = measure(bench(parts, tmp_path, ("step",)))
    assert [[r.concurrency for r in runs] for runs in asked] == [[1, 8, 32]] * 2
    options = asked[0][0].engine["compilation_config"]
    assert options["cudagraph_capture_sizes"] == [16, 32, 64, 128, 256, 384, 512]
    assert all(run.engine == asked[0][0].engine for runs in asked for run in runs)
    assert len(report["step"]) == 6


def test_an_engine_that_fails_is_named_and_the_others_results_stay(parts, asked, tmp_path):
    report = measure(bench(parts, tmp_path, ("speed",), dflash=Path("bad")))
    assert {row["drafter"] for row in report["speed"]} == {"domino", "target"}
    assert report["runs"]["dflash"]["seconds"] >= 0
    assert failures(report) == ["dflash failed: RuntimeError: no such drafter"]


def test_graphs_are_of_the_batch_sizes_that_are_run(parts):
    run = VllmRun("target", [[1]], engine={"load_format": "dummy"})
    alone = parts.few_graphs(run, 8).engine
    assert alone["compilation_config"]["cudagraph_capture_sizes"] == [1, 2, 4, 8]
    assert alone["load_format"] == "dummy"
    eager = VllmRun("target", [[1]], eager=True)
    assert parts.few_graphs(eager, 8) == eager
