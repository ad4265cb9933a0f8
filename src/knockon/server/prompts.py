"""Prompts and conversations to token ids: short ones at once, long ones on a thread of their own.

A short prompt takes a tenth of a millisecond, less than a thread needs to get the interpreter from
a loop that is busy streaming. A long one delays other prompts at most, never a stream. One thread,
and nothing beside it: the tokenizer is never used twice at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from knockon.engine.prompts import encode_prompt
from knockon.errors import Refused
from knockon.server.api_error import ApiError, bad_request
from knockon.server.bodies import ChatBody, ChatMessage, CompletionBody

T = TypeVar("T")
# Bytes of a request whose prompt is encoded at once: about a millisecond.
AT_ONCE = 4096


class PromptEncoder:
    """Encodes what requests bring.

    Args:
        tokenizer: a ``transformers`` tokenizer.
        chat_template: Jinja source in place of the tokenizer's own.

    Attributes:
        busy: prompts that the thread has or waits for.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._chat_template = chat_template
        # Only variables of the template are a client's to set.
        self._reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="knockon-tokenizer")
        self.busy = 0

    async def chat(self, body: ChatBody, size: int) -> list[int]:
        """The token ids of a conversation, up to where the assistant answers.

        Args:
            size: bytes of the request.

        Raises:
            ApiError: 400, for messages that the template does not take.
        """
        return await self._run(size, lambda: self._encode_chat(body))

    async def completion(self, body: CompletionBody, vocab_size: int, size: int) -> list[list[int]]:
        """The token ids of each prompt.

        Args:
            size: bytes of the request.

        Raises:
            ApiError: 400, for an empty prompt or an id outside the vocabulary.
        """
        return await self._run(size, lambda: self._encode_completion(body, vocab_size))

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size <= AT_ONCE and not self.busy:
            return work()
        loop = asyncio.get_running_loop()

        def left(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(self._leave)

        self.busy += 1
        done = self._thread.submit(work)
        # When the thread is done with it, however long the caller waits for that.
        done.add_done_callback(left)
        return await asyncio.wrap_future(done)

    def _leave(self) -> None:
        self.busy -= 1

    def _encode_completion(self, body: CompletionBody, vocab_size: int) -> list[list[int]]:
        prompt = body.prompt
        prompts: list[Any]
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompts = [prompt]
        else:
            prompts = list(prompt)
        encoded = []
        for each in prompts:
            if not isinstance(each, str):
                for token in each:
                    if token >= vocab_size:
                        raise bad_request(
                            f"prompt: token id {token} is outside the vocabulary", "prompt"
                        )
            try:
                encoded.append(encode_prompt(self.tokenizer, each))
            except Refused as refused:
                raise bad_request(str(refused), "prompt") from None
        return encoded

    def _encode_chat(self, body: ChatBody) -> list[int]:
        messages = [_plain(message, i) for i, message in enumerate(body.messages)]
        options: dict[str, Any] = dict(body.chat_template_kwargs or {})
        for key in options.keys() & self._reserved:
            where = f"chat_template_kwargs.{key}"
            raise bad_request(f"{where}: found an option of the server's own", where)
        if body.tools and body.tool_choice != "none":
            options["tools"] = body.tools
        if self._chat_template is not None:
            options["chat_template"] = self._chat_template
        elif not self.tokenizer.chat_template:
            raise bad_request("this model has no chat template; use /v1/completions", "messages")
        options |= {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        try:
            ids = list(self.tokenizer.apply_chat_template(messages, **options))
        except Exception as error:
            # Templates are programs: they reject conversations of their own accord, and fail on
            # what they were not written for in ways of their own.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise bad_request(
                f"the chat template does not take these messages: {reason}",
                "messages",
                "chat_template_failed",
            ) from error
        if not ids:
            raise bad_request("the chat template made nothing of these messages", "messages")
        return ids


def _plain(message: ChatMessage, index: int) -> dict[str, Any]:
    """A message as templates expect it: content as one string, tool arguments as objects."""
    found: dict[str, Any] = {"role": message.role, "content": _text(message, index)}
    found |= {k: v for k, v in (message.model_extra or {}).items() if v is not None}
    if message.tool_calls:
        found["tool_calls"] = [_with_arguments(call) for call in message.tool_calls]
    return found


def _text(message: ChatMessage, index: int) -> str:
    where = f"messages.{index}.content"
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise bad_request(f"{where}: a {message.role!r} message needs content", where)
    parts = []
    for part in message.content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ApiError(
                400,
                f"{where}: found a part of type {part.get('type')!r}, this model takes text only",
                param=where,
                code="unsupported_content",
            )
        parts.append(part["text"])
    return "".join(parts)


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"])
        except (ValueError, RecursionError):
            return call
        if isinstance(arguments, dict):
            return {**call, "function": {**function, "arguments": arguments}}
    return call
