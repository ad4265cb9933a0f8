"""Prompts from the command line, files and pipes: read as they stand, or refused in one line."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from knockon.cli import chat, generate
from knockon.engine.engine import StepOutput
from knockon.errors import Refused

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
    monkeypatch.setattr(chat.options, "open_llm", lambda *args: OneAnswer())
    chat.chat()
    captured = capsys.readouterr()
    assert captured.out == "one\ntwo\n"
    assert captured.err.count("accept length") == 2
