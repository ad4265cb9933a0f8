"""The log of a run can be drawn, cut short or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from knockon.errors import Refused
from knockon.train.curve import plot_curve, read_curve
from knockon.train.progress import ProgressLog, keep_lines


def told(log: Path) -> None:
    progress = ProgressLog(log, 0.0)
    for step in (2, 4, 6):
        progress.count(500)
        measures = {"base": 3.0 / step, "final": 2.0 / step, "forced_accept": 1.0 + step}
        if step == 4:
            measures["held_out_accept"] = 1.5
        progress.tell(step, step / 2, step / 6, measures)


def test_lines_tell_the_speed_since_the_line_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told(tmp_path / "train.jsonl")
    assert [line["tokens_per_second"] for line in read_curve(tmp_path / "train.jsonl")] == [500] * 3
    assert "step 4 " in capsys.readouterr().out


def test_a_log_is_drawn_and_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log = tmp_path / "train.jsonl"
    told(log)
    with log.open("a") as file:
        file.write('{"step": 8')
    curve = read_curve(log)
    assert [line["step"] for line in curve] == [2, 4, 6]
    plot_curve(curve, tmp_path / "curve.png", mean=1.4)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_log_is_cut_where_the_checkpoint_stands(tmp_path: Path) -> None:
    log = tmp_path / "train.jsonl"
    told(log)
    keep_lines(log, 4)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [2, 4]


def test_a_log_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="run the stage train first"):
        read_curve(tmp_path / "train.jsonl")
