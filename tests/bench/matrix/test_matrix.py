"""A real matrix of real servers on tiny models: measured, failed, gone on with, interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from knockon.bench.matrix.server import (
    ServerFailed,
    ServerProcess,
    capture_times,
    session_members,
)
from knockon.bench.serving.run import ServingReport, measure
from knockon.bench.serving.settings import ServingSettings
from knockon.cli.app import app
from knockon.engine.graphs import PrefillKey, StepKey
from knockon.engine.sampling import DrawKind
from knockon.errors import Refused
from tests.engine.conftest import tiny as tiny
from tests.engine.generation import TinyShelf

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def asked(tiny: TinyShelf, tmp_path: Path) -> list[str]:
    """A matrix of two methods, one of which has no weights yet."""
    folder = tmp_path / "workloads"
    folder.mkdir()
    lines = [json.dumps({"id": str(i), "turns": [f"tell me of {i}"]}) for i in range(5)]
    (folder / "sea.jsonl").write_text("\n".join(lines))
    broken = shutil.copytree(tiny.drafter("domino"), tmp_path / "drafter")
    (broken / "model.safetensors").unlink()
    return [
        *("bench", "matrix", str(tiny.target()), "--out", str(tmp_path / "out")),
        *("--workloads", str(folder), "--domino", str(broken)),
        *("--methods", "domino-b8,target", "--concurrency", "2", "--repeats", "1"),
        *("--num-prompts", "3", "--output-len", "12", "--ignore-eos", "--no-chat-template"),
    ]


SERVE = ["--", "--dtype", "float32", "--speculative-domino-candidate-pool-size", "64"]


def cell(out: Path, method: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "cells" / f"r1-sea-c2-{method}.json").read_text())
    return found


def test_cells_are_measured_fail_and_are_tried_again(
    asked: list[str], tiny: TinyShelf, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = CliRunner().invoke(app, [*asked, *SERVE])
    assert first.exit_code == 1, first.output
    assert "r1-sea-c2-domino-b8: FAILED" in first.stderr and "failed: 1 of 2 cells" in first.stderr
    assert '"output_len": 12' in first.stderr
    broken = cell(out, "domino-b8")
    assert broken["status"] == "failed" and "exit code 2" in broken["error"]
    assert any("safetensors" in line for line in broken["log"])
    done = cell(out, "target")
    assert done["status"] == "done" and done["exit_code"] == 0
    assert done["summary"]["completed"] == 3 and done["summary"]["output_tokens"] == 36
    assert done["server"]["capacity"]["max_batch_size"] == 2
    assert "--speculative-domino-candidate-pool-size" not in done["serve"]
    assert 0 < done["start"]["listening"] < done["start"]["ready"] < done["seconds"]
    assert len({each["text_sha256"] for each in done["requests"]}) > 1
    assert "text" not in done["requests"][0]

    stamp = (out / "cells" / "r1-sea-c2-target.json").stat().st_mtime_ns
    again = CliRunner().invoke(app, [*asked, *SERVE])
    assert again.exit_code == 1 and "failed: r1-sea-c2-domino-b8" in again.stderr

    weights = tiny.drafter("domino") / "model.safetensors"
    shutil.copy(weights, tmp_path / "drafter" / "model.safetensors")
    last = CliRunner().invoke(app, [*asked, "--retry-failed", "--save-texts", *SERVE])
    assert last.exit_code == 0, last.output
    mended = cell(out, "domino-b8")
    assert mended["status"] == "done" and mended["summary"]["accept_length"] >= 1
    assert mended["server"]["engine"]["speculative_domino_candidate_pool_size"] == 64
    assert mended["server"]["engine"]["verify_width"] == 8
    assert "text" in mended["requests"][0]
    assert (out / "cells" / "r1-sea-c2-target.json").stat().st_mtime_ns == stamp
    # FP32 on one thread: the drafter changes no answer.
    texts = [[e["text_sha256"] for e in each["requests"]] for each in (done, mended)]
    assert texts[0] == texts[1]

    pytest.importorskip("matplotlib")
    report = CliRunner().invoke(app, ["bench", "report", str(out)])
    assert report.exit_code == 0, report.output
    assert "Measured on a CPU" in report.output and "3 of 3" in report.output

    changed = [*asked, "--seed", "2", *SERVE]
    refused = CliRunner().invoke(app, changed)
    assert isinstance(refused.exception, Refused) and refused.exception.field == "seed"


def test_a_dry_run_lists_cells_and_starts_nothing(asked: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*asked, "--repeats", "2", "--dry-run", *SERVE])
    assert done.exit_code == 0, done.output
    assert "r2-sea-c2-target: to be measured" in done.stdout
    assert "domino-b8: knockon serve --model-path" in done.stdout
    assert "4 cells: 0 done, 0 failed, 4 to be measured" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("methods", ["--methods", "target,mtp-s3"]),
        ("concurrency", ["--concurrency", "one"]),
        ("workloads", ["--workloads", "/no/such.jsonl"]),
        ("num_prompts", ["--num-prompts", "8=1"]),
        ("serve argument", ["--", "--port", "1"]),
        ("serve argument", ["--", "--max-running-requests=3"]),
        ("argument", ["--", "--no-such-flag"]),
        ("argument", ["--", "stray"]),
        ("serve arguments", ["--", "--tp-size", "two"]),
    ],
)
def test_bad_input_is_refused_by_field_before_anything_runs(
    asked: list[str], tmp_path: Path, field: str, arguments: list[str]
) -> None:
    done = CliRunner().invoke(app, [*asked, *arguments])
    assert isinstance(done.exception, Refused), done.output
    assert done.exception.field == field
    assert not (tmp_path / "out").exists()


def test_a_server_that_does_not_get_ready_in_time_is_ended(tiny: TinyShelf, tmp_path: Path) -> None:
    with ServerProcess(["--model-path", str(tiny.target())], tmp_path / "log") as server:
        with pytest.raises(ServerFailed, match="not ready after"):
            server.wait_ready(0.2)
        session = server.process.pid
        assert session_members(session)
    assert server.process.poll() is not None and not session_members(session)


def test_captures_are_read_from_the_log_as_the_engine_writes_them() -> None:
    keys = (StepKey(8, 16, DrawKind(True, 0, False, False, False)), PrefillKey(1, 32))
    lines = [f"2026-01-01 INFO knockon.engine.graphs: captured {key}: 0.25 s" for key in keys]
    assert capture_times("\n".join(["starting", *lines, "ready: 3.00 s"])) == [0.25, 0.25]


def test_a_server_that_dies_while_it_is_asked_fails_its_cell(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked[asked.index("domino-b8,target")] = "target"

    def kill_it(settings: ServingSettings, *told: object) -> ServingReport:
        for pid in children(os.getpid()):
            if len(session_members(int(pid))) > 1:
                os.kill(int(pid), signal.SIGKILL)
        return measure(settings)

    monkeypatch.setattr("knockon.bench.matrix.measure.measure", kill_it)
    done = CliRunner().invoke(app, [*asked, *SERVE])
    assert done.exit_code == 1, done.output
    record = cell(tmp_path / "out", "target")
    assert record["status"] == "failed" and record["log"]
    assert "exit code -9" in record["error"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_server_outlives_the_matrix(asked: list[str], tmp_path: Path, number: int) -> None:
    log = (tmp_path / "log").open("wb")
    asked[asked.index("domino-b8,target")] = "target"
    with log:
        matrix = subprocess.Popen(
            [sys.executable, "-m", "knockon", *asked],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=log,
            stderr=log,
        )
    sessions = wait_for_server(matrix.pid)
    os.kill(matrix.pid, number)
    matrix.wait(60)
    until = time.monotonic() + 60
    while any(session_members(each) for each in sessions):
        assert time.monotonic() < until, "a server was left behind"
        time.sleep(0.05)
    assert matrix.returncode == (130 if number == signal.SIGTERM else -number)
    assert not list((tmp_path / "out" / "cells").iterdir())


def wait_for_server(parent: int) -> list[int]:
    """The sessions of a matrix's server, once its engine's process is there."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        found = [int(pid) for pid in children(parent)]
        sessions = [pid for pid in found if len(session_members(pid)) > 1]
        if sessions:
            return sessions
        time.sleep(0.05)
    raise AssertionError("no server was started")


def children(parent: int) -> list[str]:
    return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
