"""The answer to a generation: whole or as a stream, given up when the client goes."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from knockon.server.answer_parts import AnswerParts
from knockon.server.api_error import ApiError
from knockon.server.messages import Delta, End, TokenInfo
from knockon.server.metrics import Metrics
from knockon.server.submission import Submission
from knockon.server.usage import Usage

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Manner:
    """How the client wants the answer.

    Attributes:
        logprobs: whether choices carry them.
        usage: whether a stream's last chunk carries the usage.
        usage_always: whether every chunk does.
    """

    model: str
    stream: bool
    logprobs: bool = False
    usage: bool = False
    usage_always: bool = False


@dataclass
class _Choice:
    texts: list[str] = field(default_factory=list)
    infos: list[TokenInfo] = field(default_factory=list)
    end: End | None = None


class GenerationResponse(Response):
    """Waits for a submission's output while it listens for the client's leaving.

    Nothing is sent before the engine has taken the request and given a first token, so that a
    refusal has a status of its own.

    Args:
        submission: closed at the end, which aborts what still runs.
        choices: how many sequences there are, those of a prompt side by side.
        prompts: how many prompts they go on from, each as many.
        prompt_tokens: for the usage.
    """

    def __init__(
        self,
        submission: Submission,
        parts: AnswerParts,
        manner: Manner,
        choices: int,
        prompts: int,
        prompt_tokens: int,
        metrics: Metrics,
    ) -> None:
        self.background = None
        self.status_code = 200
        self._submission = submission
        self._parts = parts
        self._manner = manner
        self._choices = choices
        self._each = choices // prompts
        self._usage = Usage(prompt_tokens)
        self._metrics = metrics
        self._head = {
            "id": parts.prefix + uuid.uuid4().hex,
            "object": parts.chunk if manner.stream else parts.whole,
            "created": int(time.time()),
            "model": manner.model,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or stop when the client has gone."""
        answer = self._stream(send) if self._manner.stream else self._whole(send)
        work = asyncio.create_task(self._or_error(answer, scope, receive, send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            self._submission.close()
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _or_error(self, answer: Any, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await answer
        except ApiError as error:
            self._metrics.refused(error.status)
            await error.response()(scope, receive, send)

    async def _whole(self, send: Send) -> None:
        choices = [_Choice() for _ in range(self._choices)]
        async for batch in self._submission.batches():
            for index, delta in batch:
                choice = choices[index]
                choice.texts.append(delta.text)
                choice.infos += delta.logprobs or []
                choice.end = delta.end or choice.end
                self._count(index, delta)
        rendered = []
        for index, choice in enumerate(choices):
            infos = choice.infos if self._manner.logprobs else None
            each = self._parts.complete(index, "".join(choice.texts), infos)
            rendered.append(_ended(each, choice.end))
        content = _encode({**self._head, "choices": rendered, "usage": self._usage.as_dict()})
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _stream(self, send: Send) -> None:
        begun = False
        try:
            async for batch in self._submission.batches():
                events = b""
                if not begun:
                    await send(_STREAM_START)
                    begun = True
                    events = b"".join(self._openings())
                events += b"".join([self._event(index, delta) for index, delta in batch])
                await _send_part(send, events)
        except ApiError as error:
            if not begun:
                raise
            self._metrics.refused(error.status)
            await _send_part(send, _sse(error.body()), last=True)
            return
        events = b"data: [DONE]\n\n"
        if self._manner.usage:
            last = {**self._head, "choices": [], "usage": self._usage.as_dict()}
            events = _sse(last) + events
        await _send_part(send, events, last=True)

    def _openings(self) -> list[bytes]:
        found = [self._parts.opening(index) for index in range(self._choices)]
        return [self._chunk(choice) for choice in found if choice is not None]

    def _event(self, index: int, delta: Delta) -> bytes:
        self._count(index, delta)
        infos = (delta.logprobs or []) if self._manner.logprobs else None
        return self._chunk(_ended(self._parts.piece(index, delta.text, infos), delta.end))

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._manner.usage_always:
            chunk["usage"] = self._usage.as_dict()
        elif self._manner.usage:
            chunk["usage"] = None
        return _sse(chunk)

    def _count(self, index: int, delta: Delta) -> None:
        usage = self._usage
        usage.completion_tokens += len(delta.tokens)
        if delta.end is not None:
            if index % self._each == 0:
                usage.cached_tokens += delta.end.cached_tokens
            usage.accept_lengths += delta.end.accept_lengths


_STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


async def _send_part(send: Send, content: bytes, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": content, "more_body": not last})


def _sse(event: dict[str, Any]) -> bytes:
    return b"data: " + _encode(event) + b"\n\n"


def _ended(choice: dict[str, Any], end: End | None) -> dict[str, Any]:
    if end is not None:
        choice["finish_reason"] = end.reason
        choice["stop_reason"] = end.stop_reason
    return choice


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
