"""Conversations reach the chat template as it expects them; a template that fails is a 400."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from knockon.engine.prompts import load_prompt_tokenizer
from knockon.server.api_error import ApiError
from knockon.server.bodies import ChatBody, CompletionBody
from knockon.server.prompts import AT_ONCE, PromptEncoder
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
    return str(tokenizer.decode(asyncio.run(encoder.chat(ChatBody(**fields), 0))))


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
        asyncio.run(encoder.chat(body, 0))
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_every_form_of_a_completions_prompt_is_encoded(tokenizer: Any) -> None:
    encoder = PromptEncoder(tokenizer)
    ids = tokenizer.encode("the sea")

    def encoded(prompt: Any) -> list[list[int]]:
        return asyncio.run(encoder.completion(CompletionBody(prompt=prompt), 307, 0))

    assert encoded("the sea") == encoded(["the sea"]) == encoded(ids) == encoded([ids]) == [ids]
    assert encoded([ids, ids]) == encoded(["the sea"] * 2)


class Noting:
    """A tokenizer that notes which thread uses it, and waits to be let go off the main one."""

    chat_template = "there is one"

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.free = threading.Event()

    def apply_chat_template(self, conversation: Any, **options: Any) -> list[int]:
        """One token."""
        here = threading.current_thread()
        self.threads.append("loop" if here is threading.main_thread() else "own")
        if self.threads[-1] == "own":
            assert self.free.wait(30)
        return [1]


def test_short_prompts_are_encoded_at_once_and_behind_long_ones_in_their_turn() -> None:
    tokenizer = Noting()
    encoder = PromptEncoder(tokenizer)
    body = ChatBody(messages=[{"role": "user", "content": "hi"}])

    async def run() -> None:
        assert await encoder.chat(body, AT_ONCE) == [1]
        long = asyncio.create_task(encoder.chat(body, AT_ONCE + 1))
        await asyncio.sleep(0)
        short = asyncio.create_task(encoder.chat(body, 1))
        await asyncio.sleep(0.01)
        assert not long.done() and not short.done()  # and the loop goes on
        long.cancel()  # its client left; the thread is at it all the same
        short.cancel()
        await asyncio.gather(long, short, return_exceptions=True)
        last = asyncio.create_task(encoder.chat(body, 1))
        await asyncio.sleep(0.01)
        assert not last.done()
        tokenizer.free.set()
        assert await last == [1]
        while encoder.busy:
            await asyncio.sleep(0.001)
        await encoder.chat(body, 1)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert tokenizer.threads == ["loop", "own", "own", "loop"]
