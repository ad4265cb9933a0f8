"""What benchmarks of single kernels share."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from knockon.bench import kernel_times
from knockon.bench.kernel_times import error_of, report_kernels


def test_the_largest_difference_counts_and_too_large_a_one_ends_the_run() -> None:
    wanted = torch.tensor([1.0, -4.0])
    assert error_of(torch.tensor([1.0, -3.0]), wanted, 0.3, "x") == pytest.approx(0.25)
    with pytest.raises(SystemExit, match="x: differs from the twin's"):
        error_of(torch.tensor([1.0, -3.0]), wanted, 0.25, "x")
    with pytest.raises(SystemExit):
        error_of(torch.tensor([float("nan"), -4.0]), wanted, 0.3, "x")


def test_results_are_printed_as_they_come_and_written_with_what_they_ran_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    monkeypatch.setattr(kernel_times, "needed_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(kernel_times, "replay_us", lambda calls: 2.346)
    monkeypatch.setattr(sys, "argv", ["bench", "--json", str(file)])
    report_kernels(
        "some", "What it is.", {"dim": 4}, lambda device: [kernel_times.time_of([], 8200000)]
    )
    assert capsys.readouterr().out == "us 2.35  memory_us 2.0\n"
    found = json.loads(file.read_text())
    assert list(found) == ["benchmark", "shape", "environment", "results"]
    assert (found["benchmark"], found["shape"]) == ("some", {"dim": 4})
    assert found["results"] == [{"us": 2.35, "memory_us": 2.0}]
