from __future__ import annotations

import importlib.util

import pytest

from knockon.bench.vllm.run import VllmAnswer, VllmRun, run_together, run_vllm
from knockon.errors import KnockonError, Refused


def answer(**changed: object) -> VllmAnswer:
    fields = {
        "version": "0.25.1",
        "tokens": [[1, 2, 3], [4]],
        "logprobs": [[], []],
        "seconds": [4.0, 2.0],
        "drafts": 10,
        "accepted": 25,
        "blocks": [],
    }
    return VllmAnswer(**(fields | changed))


def test_the_bonus_token_counts_and_the_best_run_does():
    assert answer().accept_length == 3.5
    assert answer().tokens_per_second == 2.0


def test_a_target_alone_has_no_accept_length():
    assert answer(drafts=0, accepted=0).accept_length == 0.0
    assert answer(drafts=0, accepted=0).kept_length == 0.0


def test_what_a_prompt_gave_and_what_was_accepted_past_the_end_is_not_kept():
    once = answer(tokens=[[1, 2, 3, 4, 5], [6, 7, 8]], drafts=2, accepted=6, seconds=[1.0])
    assert (once.accept_length, once.kept_length) == (4.0, 3.0)
    # Both passes are in the count of verifications, one pass's tokens are here.
    assert answer(tokens=[[1, 2, 3], []], drafts=2, accepted=6).kept_length == 2.0


def test_a_step_is_the_median_of_the_full_ones():
    assert answer(full_steps=[0.004, 0.1, 0.006]).step_ms == 6.0
    assert answer().step_ms == 0.0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"draft": "other"}, "draft of a run that shares an engine: found 'other', wanted None"),
        ({"engine": {"seed": 1}}, "engine of a run that shares an engine"),
    ],
)
def test_runs_that_need_different_engines_are_not_run_together(tmp_path, changed, message):
    with pytest.raises(Refused, match=message):
        run_together([VllmRun("target", [[1]]), VllmRun("target", [[2]], **changed)], tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="vLLM is here; the engine's tests run it"
)
def test_a_failed_process_says_why_and_leaves_its_log(tmp_path):
    with pytest.raises(KnockonError, match="No module named 'vllm'"):
        run_vllm(VllmRun("target", [[1]]), tmp_path)
    assert "No module named 'vllm'" in (tmp_path / "log.txt").read_text()
