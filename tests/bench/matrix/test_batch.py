"""Servers ahead: started together, idle while another is asked, ended together whatever happens."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from knockon.bench.matrix.cells import Share
from knockon.bench.matrix.folder import ResultsFolder
from knockon.bench.matrix.measure import serve_arguments
from knockon.bench.matrix.report.write import write_report
from knockon.bench.matrix.server import ServerProcess, session_members
from knockon.bench.serving.run import ServingReport, measure
from knockon.bench.serving.settings import ServingSettings
from knockon.cli.app import app
from tests.bench.matrix.canned import (
    canned_cells,
    canned_record,
    canned_settings,
    write_canned,
)
from tests.bench.matrix.test_matrix import SERVE, cell, children
from tests.bench.matrix.test_matrix import asked as asked
from tests.engine.conftest import tiny as tiny
from tests.engine.generation import TinyShelf

pytestmark = pytest.mark.timeout(300)
TICKS = os.sysconf("SC_CLK_TCK")


def servers_of(parent: int) -> list[int]:
    """The sessions of a matrix's servers whose engine's process is there."""
    return [int(pid) for pid in children(parent) if len(session_members(int(pid))) > 1]


def cpu_seconds(session: int) -> float:
    """Of the clock of every process of a session, its threads included."""
    ticks = 0
    for pid in session_members(session):
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(found[11]) + int(found[12])
    return ticks / TICKS


def test_servers_of_a_batch_stand_from_before_its_first_cell_to_after_its_last(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing = []

    def look(settings: ServingSettings, *told: Any) -> ServingReport:
        standing.append(servers_of(os.getpid()))
        return measure(settings, *told)

    monkeypatch.setattr("knockon.bench.matrix.measure.measure", look)
    asked[asked.index("domino-b8,target")] = "target"
    more = ["--repeats", "3", "--servers-ahead", "1"]
    done = CliRunner().invoke(app, [*asked, *more, *SERVE])
    assert done.exit_code == 0, done.output
    assert [len(each) for each in standing] == [2, 2, 1]
    assert standing[0] == standing[1] and not {*standing[2]} & {*standing[0]}
    assert not servers_of(os.getpid())
    out = ResultsFolder(tmp_path / "out")
    assert out.settings()["servers_ahead"] == 1
    for record in out.records():
        assert record["status"] == "done" and record["exit_code"] == 0
        assert record["servers_ahead"] == 1 and record["share"] == "1/1"
        assert record["stop_seconds"] > 0
        assert record["serve"][record["serve"].index("--mem-fraction-static") + 1] == "0.3750"
    assert "cells a minute" in done.stderr and "[3/3]" in done.stderr


def test_a_server_of_a_batch_that_does_not_start_fails_its_own_cell_only(
    asked: list[str], tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, [*asked, "--servers-ahead", "1", *SERVE])
    assert done.exit_code == 1, done.output
    broken, sound = (cell(tmp_path / "out", method) for method in ("domino-b8", "target"))
    assert broken["status"] == "failed" and "exit code 2" in broken["error"]
    assert any("safetensors" in line for line in broken["log"])
    assert sound["status"] == "done" and sound["summary"]["completed"] == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_server_of_a_batch_outlives_the_matrix(
    asked: list[str], tmp_path: Path, number: int
) -> None:
    asked[asked.index("domino-b8,target")] = "target"
    with (tmp_path / "log").open("wb") as log:
        matrix = subprocess.Popen(
            [sys.executable, "-m", "knockon", *asked, "--repeats", "2", "--servers-ahead", "1"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=log,
            stderr=log,
        )
    until = time.monotonic() + 120
    while len(sessions := servers_of(matrix.pid)) < 2:
        assert time.monotonic() < until, "two servers never stood side by side"
        time.sleep(0.02)
    os.kill(matrix.pid, number)
    matrix.wait(60)
    while any(session_members(each) for each in sessions):
        assert time.monotonic() < until, "a server was left behind"
        time.sleep(0.05)
    assert matrix.returncode == (130 if number == signal.SIGTERM else -number)


def test_a_ready_server_that_is_asked_nothing_uses_no_cpu(tiny: TinyShelf, tmp_path: Path) -> None:
    with ServerProcess(["--model-path", str(tiny.target())], tmp_path / "log") as server:
        server.wait_ready(120)
        time.sleep(1)
        before = cpu_seconds(server.process.pid)
        assert before > 0
        time.sleep(3)
        used = cpu_seconds(server.process.pid) - before
    assert used < 0.15, f"{used:.2f} s of CPU in 3 s of idleness"


@pytest.mark.parametrize(
    ("ahead", "passed", "found"),
    [
        (0, (), None),
        (2, (), "0.2500"),
        (2, ("--kv-memory", "99"), None),
        (2, ("--mem-fraction-static=0.1",), None),
    ],
)
def test_servers_side_by_side_share_the_memory_unless_told_otherwise(
    ahead: int, passed: tuple[str, ...], found: str | None
) -> None:
    settings = dataclasses.replace(canned_settings(), servers_ahead=ahead, serve_arguments=passed)
    told = serve_arguments(settings, canned_cells(settings)[0])
    where = told.index("--mem-fraction-static") if "--mem-fraction-static" in told else None
    assert (None if where is None else told[where + 1]) == found


def test_shares_measured_apart_are_reported_as_one_matrix(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    settings = canned_settings()
    for index in (2, 1):
        folder, mine = ResultsFolder(tmp_path / "out"), Share(index, 2).of(canned_cells(settings))
        with folder.open(settings, mine):
            for each in mine:
                folder.write(each, canned_record(each))
    write_canned(tmp_path / "single")
    reports = [write_report(tmp_path / n, tmp_path / f"{n}-report") for n in ("out", "single")]
    assert reports[0] == reports[1]
