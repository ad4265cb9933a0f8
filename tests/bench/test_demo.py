"""The demo ends in words that a user understands."""

from __future__ import annotations

import runpy
import sys

import pytest

from knockon.engine import llm
from knockon.errors import Refused


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (Refused("model", "m", "another"), 2)]
)
def test_what_stops_the_demo_ends_both_models_and_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    left = []

    class Stopped:
        def __init__(self, model: str, draft: str | None = None) -> None:
            self.draft = draft

        def __enter__(self) -> Stopped:
            return self

        def __exit__(self, *_: object) -> None:
            left.append(self.draft)

        def generate(self, *_: object) -> None:
            raise error

    monkeypatch.setattr(llm, "LLM", Stopped)
    monkeypatch.delitem(sys.modules, "knockon.bench.demo", raising=False)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("knockon.bench.demo", run_name="__main__")
    assert stopped.value.code == code
    assert left == ["smollm2-135m-domino", None]
