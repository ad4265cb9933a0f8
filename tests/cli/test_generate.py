"""Prompts from the command line, files and pipes: read as they stand, or refused in one line."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from knockon.cli import chat, generate
from knockon.cli.app import app
from knockon.engine.engine import StepOutput
from knockon.errors import Refused
from tests.tiny_models import HIDDEN, TinyDrafter, TinyMTP, TinyTarget
from tests.tiny_tokenizer import VOCAB_SIZE

BAD_LINES = {
    "turns of numbers": '{"turns": [5]}',
    "messages of token ids": '{"messages": [1, 2, 3]}',
    "messages of strings": '{"messages": ["a"]}',
    "no messages": '{"messages": []}',
    "a prompt of no text": '{"prompt": 5}',
    "an empty prompt": '{"prompt": " "}',
    "another value": "[1]",
    "no JSON": "{",
    "nested without end": "[" * 100_000,
    "a number beyond reading": '{"prompt": ' + "1" * 5000 + "}",
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_line_without_a_prompt_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "good"}\n' + BAD_LINES[name] + "\n")
    with pytest.raises(Refused):
        generate.read_prompts(None, file, raw=False)


def test_each_kind_of_line_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = '[{"role": "user", "content": "c"}]'
    file.write_text(f'{{"prompt": "a"}}\n\n{{"turns": ["b", "x"]}}\n{{"messages": {messages}}}\n')
    found = generate.read_prompts(None, file, raw=False)
    assert [entry[0]["content"] for entry in found] == ["a", "b", "c"]


def test_standard_input_that_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff")))
    with pytest.raises(Refused, match="standard input"):
        generate.read_prompts(None, None, raw=True)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é".encode()), "latin-1"))
    assert generate.read_prompts(None, None, raw=True) == ["é"]


def test_only_a_terminal_is_asked_for_the_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for terminal in (False, True):
        typed = io.TextIOWrapper(io.BytesIO(b"a"))
        monkeypatch.setattr(typed, "isatty", lambda found=terminal: found)
        monkeypatch.setattr(sys, "stdin", typed)
        assert generate.read_prompts(None, None, raw=True) == ["a"]
        assert ("Ctrl-D" in capsys.readouterr().err) == terminal


class OneAnswer:
    """An LLM that answers everything with its question, and is closed with its block."""

    def __enter__(self) -> OneAnswer:
        return self

    def __exit__(self, *args: object) -> None:
        return None

    def stream(self, history, params):
        from knockon.engine.request import RequestMetrics, RequestOutput

        text = history[-1]["content"]
        metrics = RequestMetrics(0, 0, 0, [], 0, 0)
        done = RequestOutput("0", [1], text, [1], "stop", None, None, metrics)
        yield StepOutput("0", text, [1], done)


def test_answers_of_a_piped_chat_end_their_lines(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\n/reset\ntwo\n"))
    monkeypatch.setattr(chat.options, "open_llm", lambda *args, **more: OneAnswer())
    chat.chat()
    captured = capsys.readouterr()
    assert captured.out == "one\ntwo\n"
    assert captured.err.count("accept length") == 2


def test_json_says_which_exchange_was_taken_and_what_table_and_fp8_head_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = TinyTarget().save(tmp_path / "target")
    recipe = TinyDrafter()
    draft = recipe.save(tmp_path / "draft", model)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "the end"}\n{"prompt": "an other"}\n')
    arguments = f"generate {model} --file {file} --raw --json --draft {draft} --dtype float32 "
    pool = "--speculative-domino-candidate-pool-size 24 --verify-width 8 "
    pool += "--speculative-draft-head-dtype fp8 "
    with pytest.raises(SystemExit) as done:
        app((arguments + pool + "--max-tokens 12 --max-model-len 200").split())
    assert done.value.code == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    run = first["run"]
    assert run == second["run"]
    assert (run["draft"], run["verify_width"], run["candidate_pool_size"]) == ("domino", 8, 24)
    assert run["exchanges"] == {"full": run["steps"]}
    assert run["gate_table_bytes"] == VOCAB_SIZE * 3 * recipe.gru * 4
    assert run["nan_rows"] == 0
    padded = -(-VOCAB_SIZE // 16) * 16
    assert (run["draft_head_dtype"], run["draft_head_bytes"]) == ("fp8", padded * (HIDDEN + 4))
    verifications = len(first["accept_lengths"]) + len(second["accept_lengths"])
    assert sum(run["accept_lengths"].values()) == run["blocks"] == verifications


@pytest.mark.parametrize("option", ["--verify-width", "--speculative-num-draft-tokens"])
def test_the_width_may_be_auto_under_either_name(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = TinyTarget().save(tmp_path / "target")
    draft = TinyDrafter().save(tmp_path / "draft", model)
    arguments = f"generate {model} word --raw --json --draft {draft} --dtype float32 {option} auto "
    with pytest.raises(SystemExit) as done:
        app((arguments + "--max-tokens 24 --max-model-len 200").split())
    assert done.value.code == 0
    run = json.loads(capsys.readouterr().out)["run"]
    assert run["verify_width"] == "auto"
    assert sum(run["widths"].values()) == run["steps"]


def test_an_mtp_head_is_unrolled_as_far_as_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = TinyTarget().save(tmp_path / "target")
    both = TinyMTP(own=True).save(tmp_path / "both", model)
    arguments = f"generate {both} word --raw --json --dtype float32 --max-model-len 200 "
    arguments += "--speculative-algorithm MTP --speculative-num-steps 5 --max-tokens 24"
    with pytest.raises(SystemExit) as done:
        app(arguments.split())
    assert done.value.code == 0
    run = json.loads(capsys.readouterr().out)["run"]
    assert (run["draft"], run["verify_width"]) == ("mtp", 6)


def test_a_width_that_is_no_width_is_refused(tmp_path: Path) -> None:
    model = TinyTarget().save(tmp_path / "target")
    with pytest.raises(Refused, match="verify_width: found 'wide'"):
        app(f"generate {model} word --raw --verify-width wide".split())
