from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from knockon.bench.rollout import variants
from knockon.bench.rollout.plot import check_plot, write_plot
from knockon.bench.rollout.rank import RankFacts
from knockon.bench.rollout.report import Measurement, RolloutReport
from knockon.bench.rollout.settings import settle
from knockon.bench.rollout.table import print_tables
from knockon.bench.rollout.variants import Variant
from knockon.errors import Refused

# Published on two A100: milliseconds of base, A, B, C, and the gains in percent.
PUBLISHED = {
    1: ((0.795, 3.415, 2.342, 2.374), (31.4, -1.4, 30.5)),
    8: ((0.867, 5.000, 3.731, 2.808), (25.4, 24.7, 43.8)),
    64: ((5.120, 21.761, 20.402, 8.163), (6.2, 60.0, 62.5)),
}


def published_report() -> RolloutReport:
    settings = settle(shape="qwen3.6-27b", device="cpu", tp_size=2, dtype="bfloat16")
    measurements = tuple(
        Measurement(batch, variant, ((ms,), (ms / 2,)), {"all_gather": 1}, {"all_gather": 8}, None)
        for batch, (times, _) in PUBLISHED.items()
        for variant, ms in zip(settings.variants, times, strict=True)
    )
    facts = RankFacts("CPU", "gloo", 10**9, 10**9)
    return RolloutReport(settings, facts, measurements, {"B = C": 1095}, {})


@pytest.mark.parametrize("batch", PUBLISHED)
def test_gains_are_the_published_ones_for_the_published_times(batch):
    gains = published_report().gains(batch, "plain")
    assert list(gains) == ["A → B", "B → C", "A → C"]
    assert [round(gain, 1) for gain in gains.values()] == list(PUBLISHED[batch][1])


def test_a_time_is_the_median_of_the_slowest_rank():
    fast, slow = (1.0, 9.0, 1.0), (2.0, 1.0, 3.0)
    found = Measurement(1, Variant("A"), (fast, slow), {}, {}, None)
    assert found.ms == 2.0 and found.slowest_rank == slow


def test_a_stage_that_was_not_asked_for_leaves_gaps():
    report = published_report()
    kept = tuple(m for m in report.measurements if m.variant.stage not in ("base", "B"))
    report = replace(report, measurements=kept)
    gains = report.gains(8, "plain")
    assert gains["A → B"] is None and gains["B → C"] is None
    assert round(gains["A → C"], 1) == 43.8
    assert all(report.beyond_base(m) is None for m in kept)


def test_json_says_cpu_and_holds_every_number():
    data = json.loads(json.dumps(published_report().to_json()))
    assert "CPU" in data["title"] and "CPU" in data["method"]
    assert data["shape"]["vocab_size"] == 248320
    assert data["proposals_found_equal"] == {"B = C": 1095}
    assert len(data["results"]) == 12
    row = data["results"][3]
    assert (row["batch"], row["stage"], row["ms"], row["collectives"]) == (
        1,
        "C",
        2.374,
        {"all_gather": 1},
    )
    assert row["beyond_base_ms"] == pytest.approx(2.374 - 0.795)
    assert row["rounds_ms_by_rank"] == [[2.374], [1.187]]
    assert data["gains_percent"][2]["A → C"] == pytest.approx(62.49)


def printed(report: RolloutReport) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    print_tables(report, console)
    return console.export_text()


def test_the_tables_show_times_gains_and_checks():
    text = printed(published_report())
    for shown in ("CPU", "TP2", "21.761", "60.0%", "-1.4%", "1.579", "1095", "1 all_gather"):
        assert shown in text, shown


def test_a_run_that_could_compare_nothing_says_so():
    assert "No proposals were compared" not in printed(published_report())
    assert "No proposals were compared" in printed(replace(published_report(), checked={}))


def test_one_rank_of_several_says_what_it_is():
    report = published_report()
    report = replace(report, settings=replace(report.settings, tp_size=1, one_rank_of=2))
    text = printed(report)
    assert "one rank of 2" in text
    assert "local copies of the same size; tokens are not meaningful" in text


def test_an_fp8_rollout_stands_beside_the_base_of_the_runs_own_head():
    both = variants.variants_of(("base", "C"), ("plain", "fused"), "fp8")
    assert [v.label for v in both] == ["base", "C", "fused C", "fp8 base", "fp8 fused C"]
    report = published_report()
    times = tuple(
        Measurement(8, v, ((ms,),), {}, {}, 5)
        for v, ms in zip(both, (1.0, 3.0, 2.0, 0.5, 0.9), strict=True)
    )
    settings = replace(report.settings, variants=both, batches=(8,))
    facts = replace(report.facts, fp8_head_bytes=2 * 10**9)
    report = replace(report, settings=settings, measurements=times, facts=facts)
    beyond = [report.beyond_base(m) for m in times]
    assert beyond[0] is beyond[3] is None
    assert beyond[1:3] == [2.0, 1.0] and beyond[4] == pytest.approx(-0.1)
    assert [row["lm_head"] for row in report.to_json()["results"]] == ["auto"] * 3 + ["fp8"] * 2
    text = " ".join(printed(report).split())
    assert "fp8 fused C" in text and "-0.100" in text and "2 GB of LM head in FP8" in text


def test_implementations_stand_side_by_side(monkeypatch):
    monkeypatch.setattr(variants, "IMPLEMENTATIONS", ("plain", "other"))
    both = variants.variants_of(("base", "C"), ("plain", "other"))
    assert [v.label for v in both] == ["base", "C", "other C"]
    report = published_report()
    times = tuple(
        Measurement(8, v, ((ms,),), {}, {}, 5) for v, ms in zip(both, (1.0, 3.0, 2.0), strict=True)
    )
    settings = replace(report.settings, variants=both, batches=(8,))
    report = replace(report, settings=settings, measurements=times)
    assert report.implementations == ("plain", "other")
    assert [report.beyond_base(m) for m in times] == [None, 2.0, 1.0]
    assert "other C" in printed(report)


@pytest.mark.parametrize("suffix", (".png", ".svg"))
def test_a_plot_is_written(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plot{suffix}"
    check_plot(path)
    write_plot(published_report(), path)
    assert path.stat().st_size > 5000


def test_a_plot_needs_a_pictures_suffix(tmp_path):
    with pytest.raises(Refused, match="plot"):
        check_plot(tmp_path / "plot.txt")
