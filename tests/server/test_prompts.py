"""Conversations reach the chat template as it expects them; a template that fails is a 400."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from knockon.engine.prompts import load_prompt_tokenizer
from knockon.server.api_error import ApiError
from knockon.server.bodies import ChatBody, CompletionBody
from knockon.server.prompts import PromptEncoder
from tests.engine.conftest import tiny as tiny
from tests.engine.generation import TinyShelf

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Ulm"}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.fixture(scope="module")
def tokenizer(tiny: TinyShelf) -> Any:
    return load_prompt_tokenizer(tiny.target())


def rendered(tokenizer: Any, template: str, **fields: Any) -> str:
    """What a template makes of a body."""
    fields.setdefault("messages", [{"role": "user", "content": "hi"}])
    encoder = PromptEncoder(tokenizer, template)
    return str(tokenizer.decode(asyncio.run(encoder.chat(ChatBody(**fields)))))


def test_tool_arguments_reach_the_template_as_an_object(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "rain", "tool_call_id": "1", "name": "f"},
    ]
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.city }}{% endif %}"
        "{{ m.tool_call_id or '' }};{% endfor %}"
    )
    assert rendered(tokenizer, template, messages=messages) == (
        "user:weather?;assistant:Ulm;tool:rain1;"
    )


def test_tools_and_variables_reach_the_template_unless_tools_are_off(tokenizer: Any) -> None:
    template = "{{ tools[0].function.name if tools else '-' }}{{ thinking }}"
    variables = {"thinking": "yes"}
    assert rendered(tokenizer, template, tools=[TOOL], chat_template_kwargs=variables) == "fyes"
    assert rendered(tokenizer, template, tools=[TOOL], tool_choice="none") == "-"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{% if %}",
        "{{ 1 / 0 }}",
        "",
    ],
)
def test_a_template_that_fails_is_a_bad_request(tokenizer: Any, template: str) -> None:
    encoder = PromptEncoder(tokenizer, template)
    body = ChatBody(messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(ApiError) as caught:
        asyncio.run(encoder.chat(body))
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_every_form_of_a_completions_prompt_is_encoded(tokenizer: Any) -> None:
    encoder = PromptEncoder(tokenizer)
    ids = tokenizer.encode("the sea")

    def encoded(prompt: Any) -> list[list[int]]:
        return asyncio.run(encoder.completion(CompletionBody(prompt=prompt), 307))

    assert encoded("the sea") == encoded(["the sea"]) == encoded(ids) == encoded([ids]) == [ids]
    assert encoded([ids, ids]) == encoded(["the sea"] * 2)
