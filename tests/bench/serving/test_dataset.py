"""Datasets in each form are read as their authors meant them, and drawn alike for one seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from knockon.bench.serving.dataset import draw, read_dataset
from knockon.errors import Refused

SHAREGPT = [
    {"id": "a", "conversations": [{"value": "one?"}, {"value": "two."}]},
    {"id": "b", "conversations": [{"value": "asked, never answered"}]},
    {"id": "c", "conversations": [{"value": "three?"}, {"value": "four."}, {"value": "five?"}]},
]


def write(path: Path, records: list[Any], lines: bool) -> Path:
    text = "\n".join(map(json.dumps, records)) if lines else json.dumps(records)
    path.write_text(text + "\n")
    return path


@pytest.mark.parametrize("lines", [False, True])
def test_sharegpt_gives_first_turns_of_answered_conversations(tmp_path: Path, lines: bool) -> None:
    found = read_dataset(write(tmp_path / "d", SHAREGPT, lines))
    assert [(prompt.name, prompt.text) for prompt in found] == [("a", "one?"), ("c", "three?")]


def test_other_forms_of_lines_are_read(tmp_path: Path) -> None:
    records: list[Any] = [
        {"prompt": "p", "output_len": 7},
        {"turns": ["t", "later"]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "m"}]},
    ]
    found = read_dataset(write(tmp_path / "d", records, True))
    assert [prompt.text for prompt in found] == ["p", "t", "m"]
    assert [prompt.output_len for prompt in found] == [7, None, None]
    assert len(found[2].messages) == 2


def test_draws_repeat_and_never_double(tmp_path: Path) -> None:
    prompts = read_dataset(write(tmp_path / "d", [{"prompt": str(i)} for i in range(20)], True))
    drawn = draw(prompts, 10, 3)
    assert drawn == draw(prompts, 10, 3) != draw(prompts, 10, 4)
    assert len({prompt.text for prompt in drawn}) == 10
    assert draw(prompts, None, 3) == prompts
    with pytest.raises(Refused, match="num_prompts: found 21"):
        draw(prompts, 21, 3)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"other": 1}', "3", '{"prompt": ""}'])
def test_what_holds_no_prompt_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "d"
    path.write_text(text)
    with pytest.raises(Refused, match="dataset"):
        read_dataset(path)
