from __future__ import annotations

from typing import Any

import pytest

from knockon.bench.vllm.summary import (
    accept_lengths_apart,
    failures,
    merged,
    speed_ratios,
    step_differences,
    summary,
)
from knockon.errors import Refused


def row(drafter: str, concurrency: int, rate: float, accept: float, step: float) -> dict[str, Any]:
    return {
        "drafter": drafter,
        "concurrency": concurrency,
        "tokens_per_second": rate,
        "accept_length": accept,
        "step_ms": step,
    }


SPEED = [
    row("dflash", 1, 100.0, 2.0, 2.0),
    row("dflash", 8, 500.0, 2.0, 2.1),
    row("domino", 1, 146.0, 3.0, 2.05),
    row("domino", 8, 720.0, 3.0, 2.3),
    row("target", 1, 60.0, 0.0, 1.0),
]
STEP = [
    row(name, concurrency, 1.0, 6.9, step)
    for name, concurrency, step in (
        ("dflash", 1, 6.5),
        ("domino", 1, 6.75),
        ("dflash", 8, 7.5),
        ("domino", 8, 9.0),
        ("dflash", 32, 17.0),
        ("domino", 32, 17.6),
    )
]
TIE = {"answer": 3, "at": 9, "near_tie": True}
ONE = {
    "environment": {"gpu": "x"},
    "prompts": 4,
    "runs": {"domino": {"seconds": 30.0}, "target": {"seconds": 20.0}},
    "agreement": {"accept_length": 3.1, "plain": {"same": 9, "of": 9}},
    "lossless": {
        "answers": 4,
        "eager": {"accept_length": 3.1, "differences": []},
        "graphs": {"accept_length": 3.03, "differences": [TIE]},
    },
    "speed": SPEED,
}
TWO = {
    "environment": {"gpu": "y"},
    "prompts": 4,
    "runs": {"domino, 8B": {"seconds": 60.0}},
    "step": STEP,
    "knockon": {"accept_length": 3.0},
}


def test_speed_is_held_to_the_accept_lengths_less_three_hundredths():
    found = speed_ratios(SPEED)
    assert [r["concurrency"] for r in found] == [1, 8]
    assert [round(r["speed_over_accept"], 4) for r in found] == [0.9733, 0.96]
    assert [r["reached"] for r in found] == [True, False]


def test_without_dflash_there_is_no_ratio():
    assert speed_ratios([r for r in SPEED if r["drafter"] != "dflash"]) == []


def test_a_step_is_held_to_its_concurrencys_milliseconds():
    found = [
        (r["concurrency"], round(r["beyond_ms"], 3), r["reached"]) for r in step_differences(STEP)
    ]
    assert found == [(1, 0.25, True), (8, 1.5, None), (32, 0.6, False)]


def test_reports_of_two_gpus_become_one():
    whole = merged([ONE, TWO])
    assert set(whole["runs"]) == {"domino", "target", "domino, 8B"}
    assert whole["step"] == STEP and whole["speed"] == SPEED
    assert whole["environment"] == {"gpu": "x"}
    apart = accept_lengths_apart(whole)
    assert apart == pytest.approx({"eager": 0.1 / 3, "graphs": 0.01})


def test_an_engine_that_several_reports_started_is_numbered():
    again = {"runs": {"target": {"seconds": 1.0}}}
    whole = merged([ONE, again, again])
    assert list(whole["runs"]) == ["domino", "target", "target (2)", "target (3)"]
    assert [run["seconds"] for run in whole["runs"].values()] == [30.0, 20.0, 1.0, 1.0]
    # Merged reports can be merged again.
    assert list(merged([again, {"runs": {"target (2)": {}}}])["runs"]) == ["target", "target (2)"]
    runs = {"runs": whole["runs"]}
    assert list(merged([runs, runs])["runs"])[-1] == "target (6)"


def test_notes_of_all_reports_stay_and_are_shown():
    whole = merged([ONE | {"note": "Two runs."}, TWO, {"note": "Another host."}])
    assert whole["note"] == "Two runs. Another host."
    assert summary(whole).splitlines()[0] == "Two runs. Another host."


@pytest.mark.parametrize(
    "second", [{"speed": []}, {"lossless": {"answers": 4, "graphs": {"accept_length": 3.0}}}]
)
def test_the_same_part_twice_is_refused(second):
    with pytest.raises(Refused, match="each in one report only"):
        merged([ONE, second])


def test_eager_answers_and_those_in_graphs_may_come_from_different_reports():
    eager, graphs = ({"accept_length": length, "differences": []} for length in (3.1, 3.0))
    same = {"vllm": "0.25.1", "answers": 4}
    reports = [{"lossless": same | {"eager": eager}}, {"lossless": same | {"graphs": graphs}}]
    assert merged(reports)["lossless"] == same | {"eager": eager, "graphs": graphs}
    assert "graphs" not in reports[0]["lossless"]


@pytest.mark.parametrize(("name", "other"), [("vllm", "0.32.0"), ("answers", 8)])
def test_answers_of_another_vllm_or_number_are_not_put_together(name, other):
    same = {"vllm": "0.25.1", "answers": 4}
    with pytest.raises(Refused, match=rf"lossless\.{name}: found '?{other}'?, wanted {same[name]}"):
        merged([{"lossless": same}, {"lossless": same | {name: other}}])


def test_accept_lengths_are_compared_by_what_the_answers_kept():
    kept = {"accept_length": 3.1, "kept_length": 3.03, "differences": []}
    lossless = {"answers": 4, "eager": {"accept_length": 3.15}, "graphs": kept}
    report = {"lossless": lossless, "knockon": {"accept_length": 3.0}}
    assert accept_lengths_apart(report) == pytest.approx({"eager": 0.05, "graphs": 0.01})
    text = summary(report)
    assert "0 others near ties; accept length 3.100, 3.030 kept\n" in text
    assert "accept length 3.000, eager +5.00 % by vLLM's count, graphs +1.00 %\n" in text


def test_a_sound_report_has_no_failure_and_every_number():
    text = summary(merged([ONE, TWO]))
    assert failures(merged([ONE, TWO])) == []
    for part in (
        "chains as by hand, plain: 9 of 9",
        "eager: 4 of 4 answers the target's, 0 of 0 others near ties; accept length 3.100",
        "graphs: 3 of 4 answers the target's, 1 of 1 others near ties; accept length 3.030",
        "eager +3.33 % by vLLM's count, graphs +1.00 % by vLLM's count",
        "accept length 1.500, the one over the other 0.960: missed",
        "Domino - DFlash at 1: +0.250 ms: reached",
        "Domino - DFlash at 8: +1.500 ms\n",
        "no difference that rounding does not explain",
    ):
        assert part in text


def test_what_must_not_be_is_named():
    report = {
        "runs": {
            "dflash": {"seconds": 2.0, "error": "Traceback\n  ...\nRuntimeError: no memory\n"}
        },
        "agreement": {"accept_length": 3.0, "fused": {"same": 7, "of": 9}},
        "lossless": {
            "answers": 4,
            "graphs": {
                "accept_length": 3.0,
                "differences": [{"answer": 1, "at": 5, "near_tie": False}, TIE],
            },
        },
    }
    assert failures(report) == [
        "dflash failed: RuntimeError: no memory",
        "2 chains of fused differ from by hand",
        "graphs: answer 1 differs at 5, no near tie",
    ]
    assert "dflash                 2.0 s  FAILED" in summary(report)


def test_a_target_that_did_not_run_leaves_the_accept_lengths():
    report = {"lossless": {"eager": {"accept_length": 3.0}}}
    assert "eager: target not run; accept length 3.000" in summary(report)
