from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from knockon import __version__
from knockon.cli import app
from knockon.errors import KnockonError, Refused

KNOCKON = [sys.executable, "-c", "from knockon.cli.app import main; main()"]


def knockon(*arguments: str, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) | ({"KNOCKON_CACHE": str(cache)} if cache else {})
    return subprocess.run(
        [*KNOCKON, *arguments], env=environment, capture_output=True, text=True, timeout=60
    )


def test_version():
    assert knockon("--version").stdout == f"knockon {__version__}\n"


def test_help_names_the_commands_and_imports_no_torch():
    code = (
        "import sys\nfrom knockon.cli.app import app\n"
        "app(['--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("bench", "doctor", "models"))


@pytest.mark.parametrize("names", [["serve"], ["generate"], ["train"], ["bench", "serving"]])
def test_help_writes_every_option_out_in_80_columns(names, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    command = typer.main.get_command(app.app)
    for name in names:
        command = command.commands[name]
    shown = set(re.findall(r"--[a-z0-9-]+", CliRunner().invoke(app.app, [*names, "--help"]).output))
    assert {flag for option in command.params for flag in option.opts if flag[:2] == "--"} <= shown


def test_a_refusal_is_one_line_on_stderr_and_exit_code_2(tmp_path):
    done = knockon("models", "pull", "unheard-of", cache=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    assert line.startswith("error: model: found 'unheard-of'")
    assert "smollm2-135m" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "field", "named"),
    [
        (["generate", "m", "hi", "--top-p", "2"], "top_p", "--top-p"),
        (["generate", "m", "hi", "--verify-width=0"], "verify_width", "--verify-width"),
        (
            ["generate", "m", "hi", "--speculative-dflash-block-size", "0"],
            "verify_width",
            "--speculative-dflash-block-size",
        ),
        (
            ["generate", "m", "hi", "--speculative-domino-candidate-pool-size", "-1"],
            "speculative_domino_candidate_pool_size",
            "--speculative-domino-candidate-pool-size",
        ),
        (["bench", "rollout", "--pool-size", "-1"], "pool_size", "--pool-size"),
        (
            ["generate", "m", "hi", "--verify-width", "4", "--speculative-num-draft-tokens", "2"],
            "verify_width",
            "--speculative-num-draft-tokens",
        ),
        (["serve", "--model", "m"], "--model-path", "--model"),
        (["serve", "--model", "m", "--draft=d"], "--speculative-draft-model-path", "--draft"),
        (["generate", "m", "hi"], "top_p", "top_p"),  # a default, or a model's own setting
        (["generate", "m", "bench"], "pool_size", "pool_size"),
        (["generate", "m", "hi"], "model", "model"),
    ],
)
@pytest.mark.parametrize("told", [False, True])
def test_a_refusal_names_the_flag_that_was_typed(
    monkeypatch, capsys, arguments: list[str], field: str, named: str, told: bool
) -> None:
    def refuse(prog_name: str) -> None:
        refused = Refused(field, 2, "something else", "A hint.")
        raise KnockonError(str(refused)) if told else refused

    command = typer.main.get_command(app.app)
    monkeypatch.setattr(app.typer.main, "get_command", lambda _: command)
    monkeypatch.setattr(app, "app", refuse)
    monkeypatch.setattr(sys, "argv", ["knockon", *arguments])
    with pytest.raises(SystemExit) as stopped:
        app.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"error: {named}: found 2, wanted something else. A hint.\n"


def test_a_standard_input_that_is_closed_counts_as_empty():
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *KNOCKON, "generate", "m"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: prompt: found ''")


def test_misuse_is_exit_code_2_without_a_traceback():
    for arguments in (["no-such-command"], ["models", "pull"], ["doctor", "--no-such-option"]):
        done = knockon(*arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("error", "code"), [(KnockonError("no"), 2), (KeyboardInterrupt(), 130)])
def test_errors_inside_a_command_become_exit_codes(monkeypatch, capsys, error, code):
    def fail(prog_name: str) -> None:
        raise error

    command = typer.main.get_command(app.app)
    monkeypatch.setattr(app.typer.main, "get_command", lambda _: command)
    monkeypatch.setattr(app, "app", fail)
    with pytest.raises(SystemExit) as stopped:
        app.main()
    assert stopped.value.code == code
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_went_away_ends_the_command_quietly():
    process = subprocess.Popen(
        [*KNOCKON, "models", "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(60) == 1
    assert process.stderr.read() == ""


def test_interrupting_a_pull_stops_with_130_and_leaves_no_file(tmp_path):
    # A server that accepts and never answers, so the pull is still running when interrupted.
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent_index:
        port = silent_index.getsockname()[1]
        environment = {
            **os.environ,
            "KNOCKON_CACHE": str(tmp_path),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"http://127.0.0.1:{port}/simple",
            "PIP_FIND_LINKS": "",
        }
        process = subprocess.Popen(
            [*KNOCKON, "models", "pull", "smollm2-135m"],
            # A test run started in the background of a script ignores the signal; so would this.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        folder = tmp_path / "models" / "smollm2-135m"
        deadline = time.monotonic() + 30
        while not list(folder.glob("partial-*/pip.log")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in complaint
    assert [path.name for path in folder.iterdir()] == [".lock"]
