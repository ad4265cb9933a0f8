"""The loop that gives vLLM's engine its requests, around an engine that counts."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from knockon.bench.vllm.engine import generate


class Counting:
    """Each step gives every request its next tokens; request ``i`` ends after its prompt's sum."""

    def __init__(self) -> None:
        self.left: dict[str, list[int]] = {}
        self.most = 0

    def add_request(self, name: str, prompt: dict[str, Any], params: Any) -> None:
        first, count = prompt["prompt_token_ids"]
        self.left[name] = [first + i for i in range(count)]
        self.most = max(self.most, len(self.left))
        assert params.fields["temperature"] == 0.0

    def step(self) -> list[Any]:
        outputs = []
        for name, tokens in list(self.left.items()):
            given, self.left[name] = tokens[:2], tokens[2:]
            rows = [{token: SimpleNamespace(logprob=-1.0 * token)} for token in given]
            part = SimpleNamespace(token_ids=given, logprobs=rows)
            finished = not self.left[name]
            outputs.append(SimpleNamespace(request_id=name, outputs=[part], finished=finished))
            if finished:
                del self.left[name]
        return outputs


@pytest.fixture(autouse=True)
def parameters(monkeypatch) -> None:
    """In vLLM's place, so that this runs where it is not installed."""
    vllm, inner = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vllm.SamplingParams = lambda **fields: SimpleNamespace(fields=fields)  # type: ignore[attr-defined]
    inner.RequestOutputKind = SimpleNamespace(DELTA="delta")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", inner)


@pytest.mark.parametrize("concurrency", [1, 2, 8])
def test_every_prompt_is_answered_with_so_many_in_flight(concurrency):
    engine = Counting()
    prompts = [[10, 4], [20, 1], [30, 5]]
    found = generate(engine, prompts, {"max_tokens": 9}, concurrency)
    assert found.tokens == [[10, 11, 12, 13], [20], [30, 31, 32, 33, 34]]
    assert found.logprobs[1] == [{20: -20.0}]
    assert engine.most == min(concurrency, len(prompts))
    assert found.seconds > 0


def test_only_steps_between_two_full_ones_are_timed():
    """Two alike: four steps, three in between. One more request: a step that lets it in is none."""
    assert len(generate(Counting(), [[10, 8], [20, 8]], {}, 2).full_steps) == 3
    assert len(generate(Counting(), [[10, 8], [20, 4], [30, 4]], {}, 2).full_steps) == 1 + 1
    assert generate(Counting(), [[10, 8]], {}, 2).full_steps == []
