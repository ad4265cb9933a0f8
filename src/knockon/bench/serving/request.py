"""One request: sent, streamed, timed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from knockon.bench.serving.dataset import BenchPrompt
from knockon.bench.serving.settings import ServingSettings

KEY_WANTED = (
    "HTTP 401: the server asks for a key, the right one (--api-key, OPENAI_API_KEY or "
    "KNOCKON_API_KEY)"
)

# What becomes of a question where there is no server, and where the answer is none of OpenAI's.
UNREACHED = (aiohttp.ClientError, TimeoutError, ValueError)
NONSENSE = (LookupError, TypeError, AttributeError, RecursionError)
_JSON = {"Content-Type": "application/json"}
_decode = msgspec.json.Decoder().decode


@dataclass
class Timed:
    """What became of a request; times in seconds from its sending.

    Attributes:
        started: seconds since the run began.
        ttft: to the first event with text.
        gaps: between the events after it. An event holds what one step of the server gave, which
            may be several tokens.
        verifications, kept: as the server tells: how many, and the tokens they kept.
        error: why it failed; empty where it did not.
    """

    name: str
    started: float = 0.0
    ttft: float = 0.0
    e2e: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    verifications: int = 0
    kept: int = 0
    finish_reason: str = ""
    text: str = ""
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """Mean time of a token after the first; ``None`` with fewer than two."""
        if self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)


def body_of(
    prompt: BenchPrompt, settings: ServingSettings, model: str, output_len: int
) -> tuple[str, dict[str, Any]]:
    """Path and JSON body of a request."""
    body: dict[str, Any] = {
        "model": model,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_tokens": output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if settings.ignore_eos:
        body["ignore_eos"] = True
    if settings.chat:
        return "/v1/chat/completions", body | {"messages": prompt.messages}
    return "/v1/completions", body | {"prompt": prompt.text}


async def send(
    client: aiohttp.ClientSession, name: str, url: str, body: dict[str, Any], began: float
) -> Timed:
    """Send a request and follow its stream; failures are part of the result.

    Args:
        began: ``time.perf_counter()`` at the start of the run.
    """
    sent = time.perf_counter()
    timed = Timed(name, started=sent - began)
    try:
        content = msgspec.json.encode(body)
        async with client.post(url, data=content, headers=_JSON, allow_redirects=False) as answer:
            if answer.status == 401:
                timed.error = KEY_WANTED
                return timed
            if answer.status != 200:
                text = (await answer.read()).decode(errors="replace")
                timed.error = f"HTTP {answer.status}: {text[:300]}"
                return timed
            await _follow(answer, timed, sent)
    except UNREACHED as error:
        timed.error = one_line(error)
    except NONSENSE as error:
        timed.error = f"an event that is none of OpenAI's: {one_line(error)}"
    if not timed.error and not timed.ttft:
        timed.error = "the stream had no text"
    return timed


def one_line(error: Exception) -> str:
    """An error's kind and the first line of what it says, if it says anything."""
    return f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")


async def _follow(answer: aiohttp.ClientResponse, timed: Timed, sent: float) -> None:
    pieces: list[str] = []
    last, left, events, done = 0.0, b"", 0, False
    async for part in answer.content.iter_any():
        now = time.perf_counter() - sent
        *lines, left = (left + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            done = done or data == b"[DONE]"
            if not line.startswith(b"data:") or not data.startswith(b"{"):
                continue
            found = _decode(data)
            if "error" in found:
                timed.error = str(found["error"])[:300]
                return
            _take_usage(found.get("usage"), timed)
            gained = _take_choice(found.get("choices"), pieces, timed)
            if gained:
                events += 1
                if not timed.ttft:
                    timed.ttft = now
                else:
                    timed.gaps.append(now - last)
                last = timed.e2e = now
    timed.text = "".join(pieces)
    if not (done or timed.finish_reason):
        timed.error = "the stream ended early, with neither a finish_reason nor [DONE]"
    # A server that tells no usage: an event a token, as servers without speculation stream.
    timed.output_tokens = timed.output_tokens or events


def _take_choice(choices: Any, pieces: list[str], timed: Timed) -> bool:
    """Whether an event brought text, or the end."""
    if not choices:
        return False
    choice = choices[0]
    text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    pieces.append(text)
    if choice.get("finish_reason"):
        timed.finish_reason = choice["finish_reason"]
        return True
    return bool(text)


def _take_usage(usage: Any, timed: Timed) -> None:
    if not usage:
        return
    timed.prompt_tokens = usage.get("prompt_tokens") or 0
    timed.output_tokens = usage.get("completion_tokens") or 0
    told = usage.get("speculation")
    if told:
        timed.verifications = told["verifications"]
        timed.kept = told["verifications"] + told["accepted_tokens"]
