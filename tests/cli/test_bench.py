from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from knockon.cli.app import app
from knockon.errors import Refused

QUICK = ("--device", "cpu", "--rounds", "1", "--replays", "1", "--check-proposals", "90")


def bench(*arguments: str):
    return CliRunner().invoke(app, ["bench", "rollout", *QUICK, *arguments])


def test_tables_on_stdout_progress_on_stderr_and_json_in_a_file(tmp_path):
    file = tmp_path / "rollout.json"
    done = bench("--batches", "1,2", "--json", str(file))
    assert done.exit_code == 0, done.output
    assert "Domino rollout, tiny, TP1, float32, CPU" in done.stdout
    assert "A → B" in done.stdout and "B = C: 135 proposal ids" in done.stdout
    assert len(done.stderr.splitlines()) == 8 and "batch   2  C" in done.stderr
    data = json.loads(file.read_text())
    assert data["settings"]["batches"] == [1, 2]
    assert data["environment"]["versions"]["torch"]
    assert {row["stage"] for row in data["results"]} == {"base", "A", "B", "C"}


@pytest.mark.parametrize(
    ("field", "arguments"),
    (
        ("shape", ("--shape", "nameless")),
        ("stages", ("--stages", "A,Z")),
        ("implementation", ("--implementation", "magic")),
        ("batches", ("--batches", "one")),
        ("json", ("--json", "/no/such/folder/file.json")),
        ("plot", ("--plot", "/no/such/folder/file.png")),
    ),
)
def test_bad_input_is_refused_by_field_before_anything_runs(field, arguments):
    done = bench(*arguments)
    assert isinstance(done.exception, Refused) and done.exception.field == field
    assert not done.stdout


def test_torchruns_ranks_must_be_those_asked_for(monkeypatch):
    there = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}
    for name, value in there.items():
        monkeypatch.setenv(name, value)
    for arguments in (("--tp-size", "3"), ("--one-rank-of", "2")):
        done = bench(*arguments)
        assert isinstance(done.exception, Refused)
        assert "2" in done.exception.wanted


def test_the_module_runs_as_the_command_does():
    command = [sys.executable, "-m", "knockon", "bench", "rollout", "--batches", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: --batches: found [0]")


@pytest.mark.parametrize(
    ("field", "variables"),
    [
        ("MASTER_ADDR", {"RANK": "0", "WORLD_SIZE": "2"}),
        ("WORLD_SIZE", {"RANK": "0"}),
        ("RANK", {"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}),
        ("RANK", {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}),
        ("WORLD_SIZE", {"RANK": "0", "WORLD_SIZE": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"}),
        ("MASTER_PORT", {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "p"}),
    ],
)
def test_an_environment_that_torchrun_never_makes_is_refused(monkeypatch, field, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = bench("--shape", "tiny")
    assert isinstance(result.exception, Refused)
    assert field in str(result.exception)


def test_torchrun_runs_it_on_its_ranks_and_one_of_them_prints(tmp_path):
    file = tmp_path / "rollout.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "knockon", "bench", "rollout", *QUICK]
    command += ["--batches", "1", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Domino rollout, tiny, TP2, float32, CPU") == 1
    data = json.loads(file.read_text())
    assert data["settings"]["tp_size"] == 2
    assert data["rank_0"]["collectives_by"] == "gloo"
    assert all(len(row["rounds_ms_by_rank"]) == 2 for row in data["results"])
