"""The official client gets what the engine gives offline, streamed or whole, alone or not."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

import pytest

from knockon.engine.llm import LLM
from knockon.engine.request import RequestOutput
from knockon.engine.sampling_params import SamplingParams
from tests.server.running import NAME, ServerProcess

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me of the sea, and the one there."}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 40}
PARAMS = {
    "greedy": (GREEDY, SamplingParams(temperature=0, max_tokens=40)),
    "seeded": (SEEDED, SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=40)),
}
pytestmark = pytest.mark.timeout(180)


def only(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    return llm.generate([prompt], params)[0]


@pytest.mark.parametrize("kind", PARAMS)
def test_a_chat_streamed_whole_and_offline_is_the_same(
    server: ServerProcess, offline: LLM, kind: str
) -> None:
    asked, params = PARAMS[kind]
    expected = only(offline, MESSAGES, params)
    client = server.client()
    whole = client.chat.completions.create(model=NAME, messages=MESSAGES, **asked)
    chunks = list(
        client.chat.completions.create(
            model=NAME,
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            **asked,
        )
    )
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].finish_reason == expected.finish_reason
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(pieces) == expected.text
    assert chunks[-2].choices[0].finish_reason == expected.finish_reason
    assert chunks[-1].choices == []
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None
        assert usage.prompt_tokens == len(expected.prompt_token_ids)
        assert usage.completion_tokens == len(expected.token_ids)
        assert usage.completion_tokens_details is not None
        accepted = sum(expected.metrics.accept_lengths) - len(expected.metrics.accept_lengths)
        assert usage.completion_tokens_details.accepted_prediction_tokens == accepted
        found: Any = usage.model_extra
        assert found["speculation"]["verifications"] == len(expected.metrics.accept_lengths)


@pytest.mark.parametrize("kind", PARAMS)
def test_a_completion_streamed_whole_and_offline_is_the_same(
    server: ServerProcess, offline: LLM, kind: str
) -> None:
    asked, params = PARAMS[kind]
    expected = only(offline, "The river ran", params)
    client = server.client()
    for prompt in ("The river ran", expected.prompt_token_ids):
        whole = client.completions.create(model=NAME, prompt=prompt, **asked)
        stream = client.completions.create(model=NAME, prompt=prompt, stream=True, **asked)
        assert whole.choices[0].text == expected.text
        assert "".join(chunk.choices[0].text for chunk in stream) == expected.text


def test_choices_of_one_prompt_have_seeds_in_a_row(server: ServerProcess, offline: LLM) -> None:
    params = PARAMS["seeded"][1]
    expected = [only(offline, MESSAGES, replace(params, seed=7 + i)).text for i in range(3)]
    client = server.client()
    whole = client.chat.completions.create(model=NAME, messages=MESSAGES, n=3, **SEEDED)
    assert [choice.message.content for choice in whole.choices] == expected
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(
        model=NAME, messages=MESSAGES, n=3, stream=True, **SEEDED
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == expected


def test_several_prompts_are_answered_in_order(server: ServerProcess, offline: LLM) -> None:
    prompts = ["One day", "The other", "In the end"]
    expected = [output.text for output in offline.generate(prompts, PARAMS["greedy"][1])]
    found = server.client().completions.create(model=NAME, prompt=prompts, **GREEDY)
    assert [choice.text for choice in found.choices] == expected
    assert [choice.index for choice in found.choices] == [0, 1, 2]


def test_logprobs_are_the_engines_streamed_or_whole(server: ServerProcess, offline: LLM) -> None:
    expected = only(offline, MESSAGES, replace(PARAMS["greedy"][1], logprobs=3)).logprobs
    assert expected is not None
    client = server.client()
    asked: dict[str, Any] = {**GREEDY, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(model=NAME, messages=MESSAGES, **asked)
    assert whole.choices[0].logprobs is not None
    entries = [whole.choices[0].logprobs.content or []]
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(
        model=NAME, messages=MESSAGES, stream=True, **asked
    ):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    entries.append(streamed)
    for found in entries:
        assert [entry.logprob for entry in found] == pytest.approx(
            [each.logprob for each in expected], abs=1e-4
        )
        for entry, each in zip(found, expected, strict=True):
            values = [top.logprob for top in entry.top_logprobs]
            assert values == pytest.approx(list(each.top.values()), abs=1e-4)
    plain = client.completions.create(model=NAME, prompt="The river", logprobs=2, **GREEDY)
    found = plain.choices[0].logprobs
    assert found is not None and found.tokens is not None and found.token_logprobs is not None
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset or [])


def test_further_fields_reach_the_engine(server: ServerProcess, offline: LLM) -> None:
    fields: dict[str, Any] = {
        "top_k": 20,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "ignore_eos": True,
        "bad_words": ["he", "an"],
        "stop_token_ids": [3],
    }
    common: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 30}
    penalties: dict[str, Any] = {"presence_penalty": 0.4, "frequency_penalty": 0.3}
    params = SamplingParams(**fields, **common, **penalties)
    found = server.client().chat.completions.create(
        model=NAME, messages=MESSAGES, extra_body=fields, **common, **penalties
    )
    assert found.choices[0].message.content == only(offline, MESSAGES, params).text


def test_speculation_off_gives_the_same_answer_a_token_at_a_time(
    server: ServerProcess, offline: LLM
) -> None:
    expected = only(offline, MESSAGES, PARAMS["seeded"][1])
    found = server.client().chat.completions.create(
        model=NAME, messages=MESSAGES, extra_body={"speculation": False}, **SEEDED
    )
    assert found.choices[0].message.content == expected.text
    assert found.usage is not None
    extra: Any = found.usage.model_extra
    assert extra["speculation"] == {
        "verifications": len(expected.token_ids) - 1,
        "accepted_tokens": 0,
        "mean_accept_length": 1.0,
    }


def test_a_stop_string_ends_the_answer_and_is_named(server: ServerProcess, offline: LLM) -> None:
    text = only(offline, MESSAGES, PARAMS["greedy"][1]).text
    middle = len(text) // 2
    stop = text[middle : middle + 2]
    found = server.client().chat.completions.create(
        model=NAME, messages=MESSAGES, stop=[stop], **GREEDY
    )
    expected = only(offline, MESSAGES, replace(PARAMS["greedy"][1], stop=[stop]))
    assert found.choices[0].message.content == expected.text == text[: text.index(stop)]
    assert found.choices[0].finish_reason == "stop"
    extra: Any = found.choices[0].model_extra
    assert extra["stop_reason"] == stop


def test_content_parts_of_text_are_one_text(server: ServerProcess) -> None:
    client = server.client()
    parts: list[Any] = [{"type": "text", "text": "Tell me of the sea, "}]
    parts.append({"type": "text", "text": "and the one there."})
    answers = [
        client.chat.completions.create(model=NAME, messages=messages, **GREEDY).choices[0].message
        for messages in (MESSAGES, [{"role": "user", "content": parts}])
    ]
    assert answers[0] == answers[1]


def test_a_crowd_gets_the_same_answers_as_each_alone(server: ServerProcess, offline: LLM) -> None:
    words = ["sea", "land", "air", "fire", "stone", "tree", "bird", "night"]
    prompts = [[{"role": "user", "content": f"Tell me of the {word}."}] for word in words]
    expected = [output.text for output in offline.generate(prompts, PARAMS["greedy"][1])]

    async def crowd() -> list[str]:
        async with server.async_client() as client:

            async def ask(i: int) -> str:
                messages: Any = prompts[i]
                if i % 2:
                    answer = await client.chat.completions.create(
                        model=NAME, messages=messages, **GREEDY
                    )
                    return answer.choices[0].message.content or ""
                text = ""
                stream: Any = await client.chat.completions.create(
                    model=NAME, messages=messages, stream=True, **GREEDY
                )
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                return text

            return list(await asyncio.gather(*map(ask, range(len(prompts)))))

    assert asyncio.run(crowd()) == expected


def test_a_prompt_seen_before_is_found_in_the_cache_until_it_is_flushed(
    server: ServerProcess,
) -> None:
    client = server.client()

    def cached() -> int:
        answer = client.chat.completions.create(model=NAME, messages=MESSAGES, **GREEDY)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    cached()
    assert cached() > 0
    with server.http() as http:
        assert http.post("/flush_cache").json()["flushed_pages"] > 0
    assert server.wait_idle()["cached_pages"] == 0
    assert cached() == 0


def test_samples_of_a_prompt_count_what_the_cache_had_of_it_once_each(
    server: ServerProcess,
) -> None:
    client = server.client()

    def counted() -> tuple[float, float]:
        with server.http() as http:
            text = http.get("/metrics").text
        names = ("prompt_tokens", "prefix_cache_hit_tokens")
        found = [re.search(rf"^knockon_{name}_total (\S+)$", text, re.MULTILINE) for name in names]
        assert found[0] is not None and found[1] is not None
        return float(found[0][1]), float(found[1][1])

    def ask(n: int) -> tuple[int, int]:
        answer = client.chat.completions.create(model=NAME, messages=MESSAGES, n=n, **GREEDY)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens or 0

    ask(1)
    prompt, cached = ask(1)
    before = counted()
    assert cached > 0 and ask(4) == (prompt, cached)
    assert tuple(now - was for now, was in zip(counted(), before, strict=True)) == (
        4 * prompt,
        4 * cached,
    )


def test_the_model_is_listed(server: ServerProcess) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
