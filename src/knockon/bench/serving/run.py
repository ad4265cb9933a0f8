"""A serving benchmark from warm-up to summary."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

from knockon.bench.serving.dataset import BenchPrompt, draw, read_dataset
from knockon.bench.serving.request import (
    KEY_WANTED,
    NONSENSE,
    UNREACHED,
    Timed,
    body_of,
    one_line,
    send,
)
from knockon.bench.serving.settings import ServingSettings
from knockon.bench.serving.summary import Summary, summarise
from knockon.errors import KnockonError, Refused

WARMUP_TOKENS = 32
_NOT_TOLD = UNREACHED + NONSENSE


class BenchFailed(KnockonError, RuntimeError):
    """The server cannot be measured; the message says why."""


@dataclass(frozen=True)
class ServingReport:
    """A run and what it found."""

    settings: ServingSettings
    model: str
    summary: Summary
    requests: list[Timed]
    server: dict[str, Any] | None

    def to_json(self, details: bool) -> dict[str, Any]:
        """Plain data; with ``details`` every request."""
        asked = asdict(self.settings) | {"dataset": str(self.settings.dataset), "model": self.model}
        del asked["api_key"]
        asked["request_rate"] = str(asked["request_rate"])  # JSON has no infinity
        found: dict[str, Any] = {"settings": asked, "summary": self.summary.as_dict()}
        found["server"] = self.server
        if details:
            found["requests"] = [asdict(each) for each in self.requests]
        else:
            found["errors"] = sorted({each.error for each in self.requests if each.error})
        return found


def measure(
    settings: ServingSettings,
    doing: Callable[[str], None] = lambda text: None,
    ended: Callable[[], None] = lambda: None,
) -> ServingReport:
    """Run a benchmark.

    Args:
        doing: told what is being done.
        ended: called after each counted request.

    Raises:
        Refused: a dataset or settings that do not fit.
        BenchFailed: no server there, or no request that succeeded.
    """
    prompts = draw(read_dataset(settings.dataset), settings.num_prompts, settings.seed)
    for prompt in prompts:
        if settings.output_len is None and prompt.output_len is None:
            raise Refused(
                "output_len",
                None,
                "a number where records have no output_len",
                "Give --output-len.",
            )
    return asyncio.run(_measure(settings, prompts, doing, ended))


async def _measure(
    settings: ServingSettings,
    prompts: list[BenchPrompt],
    doing: Callable[[str], None],
    ended: Callable[[], None],
) -> ServingReport:
    headers = {"Accept-Encoding": "identity"}
    if settings.api_key:
        headers["Authorization"] = f"Bearer {settings.api_key}"
    async with aiohttp.ClientSession(
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=settings.timeout),
        connector=aiohttp.TCPConnector(limit=0),
    ) as client:
        model = settings.model or await _ask_model(client, settings.root)
        await _warm_up(client, settings, model, prompts[0], doing)
        doing("measuring")
        began = time.perf_counter()
        results = await _load(client, settings, model, prompts, began, ended)
        duration = time.perf_counter() - began
        server = await _ask_server(client, settings.root)
    if all(each.error for each in results):
        raise BenchFailed(f"no request of {len(results)} succeeded: {results[0].error}")
    return ServingReport(settings, model, summarise(results, duration), results, server)


async def _load(
    client: aiohttp.ClientSession,
    settings: ServingSettings,
    model: str,
    prompts: list[BenchPrompt],
    began: float,
    ended: Callable[[], None],
) -> list[Timed]:
    places = asyncio.Semaphore(settings.max_concurrency or len(prompts))
    arrivals = random.Random(settings.seed)

    async def one(prompt: BenchPrompt) -> Timed:
        async with places:
            output_len = settings.output_len or prompt.output_len or 1
            path, body = body_of(prompt, settings, model, output_len)
            timed = await send(client, prompt.name, settings.root + path, body, began)
        ended()
        return timed

    tasks = []
    for prompt in prompts:
        tasks.append(asyncio.create_task(one(prompt)))
        if settings.request_rate != float("inf"):
            await asyncio.sleep(arrivals.expovariate(settings.request_rate))
    return list(await asyncio.gather(*tasks))


async def _warm_up(
    client: aiohttp.ClientSession,
    settings: ServingSettings,
    model: str,
    prompt: BenchPrompt,
    doing: Callable[[str], None],
) -> None:
    if settings.warmup_requests:
        doing("warming up")
        length = min(settings.output_len or prompt.output_len or WARMUP_TOKENS, WARMUP_TOKENS)
        path, body = body_of(prompt, settings, model, length)
        url = settings.root + path
        places = asyncio.Semaphore(settings.max_concurrency or settings.warmup_requests)

        async def one() -> Timed:
            async with places:
                return await send(client, "warm-up", url, body, time.perf_counter())

        for timed in await asyncio.gather(*(one() for _ in range(settings.warmup_requests))):
            if timed.error:
                raise BenchFailed(f"a warm-up request failed: {timed.error}")
    if settings.flush_cache:
        try:
            async with client.post(settings.root + "/flush_cache") as answer:
                status = answer.status
        except _NOT_TOLD as error:
            raise BenchFailed(f"/flush_cache: {one_line(error)}") from None
        if status != 200:
            raise Refused("flush_cache", status, "a server with POST /flush_cache")


async def _ask_model(client: aiohttp.ClientSession, root: str) -> str:
    try:
        async with client.get(root + "/v1/models") as answer:
            if answer.status == 401:
                raise BenchFailed(f"{root}: {KEY_WANTED}")
            answer.raise_for_status()
            name: str = (await answer.json(content_type=None))["data"][0]["id"]
    except _NOT_TOLD as error:
        raise BenchFailed(f"{root} tells no model at /v1/models: {one_line(error)}") from None
    return name


async def _ask_server(client: aiohttp.ClientSession, root: str) -> dict[str, Any] | None:
    """What the server says of itself, where it says so."""
    try:
        async with client.get(root + "/server_info") as answer:
            found = await answer.json(content_type=None) if answer.status == 200 else None
    except _NOT_TOLD:
        return None
    return found if isinstance(found, dict) else None
