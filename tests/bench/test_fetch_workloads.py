"""benchmarks/fetch_workloads.py: rows of the public sets become files that every reader takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from knockon.bench.acceptance.workloads import load_workloads
from knockon.bench.matrix.workloads import find_workloads
from knockon.bench.workload_files import TITLES
from knockon.cli.generate import read_prompts as read_chats
from knockon.train.chat_format import read_prompts
from tests.benchmark_scripts import load_script

# One row of each set with the fields that are published, and what a user says by it.
ROWS: dict[str, dict[str, Any]] = {
    "openai/gsm8k": {"question": "How many?", "answer": "6 * 7 = 42\n#### 42"},
    "HuggingFaceH4/MATH-500": {"problem": "Find $x$.", "solution": "$x = 1$", "answer": "1"},
    "openai/openai_humaneval": {
        "task_id": "HumanEval/0",
        "prompt": "\n\ndef one():\n    '''1'''\n",
        "entry_point": "one",
    },
    "google-research-datasets/mbpp": {
        "task_id": 11,
        "text": "Write a function to add.",
        "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    },
    "HuggingFaceH4/mt_bench_prompts": {"prompt": ["Write a post.", "Now rhyme."], "prompt_id": 1},
    "tatsu-lab/alpaca": {"instruction": "Plan it.", "input": "A wedding", "output": "…"},
}
SAID = {
    "gsm8k": ["How many?"],
    "math500": ["Find $x$."],
    "humaneval": [
        "Complete the following Python function. Answer with the whole function in one code block."
        "\n\n```python\n\n\ndef one():\n    '''1'''\n```"
    ],
    "mbpp": [
        "Write a function to add. Your code should pass this test:\nassert add(1, 2) == 3",
    ],
    "mt-bench": ["Write a post.", "Now rhyme."],
    "alpaca": ["Plan it.\n\nA wedding"],
}


@pytest.fixture
def script() -> ModuleType:
    return load_script("fetch_workloads")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was loaded from the hub, which is not asked here."""
    found: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
        found.append((name, config, split))
        return [ROWS[name], {}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return found


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["fetch_workloads.py", *words])
    script.main()


def test_each_set_becomes_a_file_that_every_reader_takes(
    script: ModuleType,
    asked: list[tuple[Any, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "workloads"
    run(script, monkeypatch, str(folder), "--each", "1")
    assert [name for name, _, _ in asked] == list(ROWS)
    assert {file.stem for file in folder.iterdir()} == set(SAID) == set(TITLES)
    for name, turns in SAID.items():
        file = folder / f"{name}.jsonl"
        assert json.loads(file.read_text("utf-8")) == {"id": f"{name}/0", "turns": turns}
        assert read_prompts(file) == turns[:1]
        assert read_chats(None, file, raw=False)[0][0]["content"] == turns[0]
    assert [w.prompts for w in load_workloads([folder], None)] == [(t[0],) for t in SAID.values()]
    assert [(w.name, w.prompts) for w in find_workloads([folder])] == [(n, 1) for n in SAID]


def test_some_sets_alone_and_what_cannot_be_had(
    script: ModuleType,
    asked: list[tuple[Any, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(script, monkeypatch, str(tmp_path), "--each", "1", "--only", "mbpp, gsm8k")
    assert {file.stem for file in tmp_path.iterdir()} == {"gsm8k", "mbpp"}
    monkeypatch.setitem(sys.modules, "datasets", None)
    for words, said in (
        (["--only", "sharegpt"], "sharegpt; there are gsm8k, math500"),
        (["--each", "0"], "at least 1"),
        ([], "pip install datasets"),
    ):
        with pytest.raises(SystemExit):
            run(script, monkeypatch, str(tmp_path), *words)
        assert said in capsys.readouterr().err
