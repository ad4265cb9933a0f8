"""Prompts come from a file or from a column of a data set, whatever form its turns have."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from knockon.errors import Refused
from knockon.train.prompt_source import load_prompts


class Rows(dict):  # type: ignore[type-arg]
    @property
    def column_names(self) -> list[str]:
        return list(self)


def hub(monkeypatch: pytest.MonkeyPatch, **columns: list[Any]) -> list[tuple[str, str]]:
    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, split: str) -> Rows:
        asked.append((name, split))
        return Rows(columns)

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_a_file_is_read_and_a_missing_one_refused(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"turns": ["one", "two"]}\n')
    assert load_prompts(str(tmp_path / "p.jsonl")) == ["one"]
    with pytest.raises(Refused, match="prompts"):
        load_prompts(str(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    "value",
    [
        "why?",
        ["why?", "and then?"],
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}],
        [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "so"}],
    ],
)
def test_the_first_turn_is_found_in_every_form(
    monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    asked = hub(monkeypatch, id=[1], prompt=[value])
    assert load_prompts("hub:org/set") == ["why?"]
    assert load_prompts("hub:org/set:test:prompt") == ["why?"]
    assert asked == [("org/set", "train"), ("org/set", "test")]


def test_what_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, id=[1], body=["x"])
    with pytest.raises(Refused, match="one of id, body"):
        load_prompts("hub:org/set")
    with pytest.raises(Refused, match="a text, turns or messages"):
        load_prompts("hub:org/set:train:id")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(Refused, match="pip install datasets"):
        load_prompts("hub:org/set")
