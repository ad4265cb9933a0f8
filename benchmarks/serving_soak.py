"""Keep a server busy with good, bad and leaving clients, and see that nothing is lost or left.

    python benchmarks/serving_soak.py --model smollm2-135m --draft smollm2-135m-domino \
        --requests 1000 --connections 64 --json benchmarks/results/serving_soak.json

It starts ``knockon serve``, asks every good request once alone for what is right (greedy), then
sends the mix. It fails unless every good request is answered right, every bad one by 4xx, no page
is held at the end, memory and descriptors are flat within 5 % over the second half, and the log
holds nothing above information.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from knockon.bench.matrix.server import ServerFailed, ServerProcess

# Of the server's log; whatever is no such line, a warning or a traceback say, counts as a fault.
INFORMATION = re.compile(r"\d{4}-\d\d-\d\d \S+ INFO \S+: ")
READY_LIMIT = 600.0  # s
WORDS = (
    "sea",
    "land",
    "air",
    "fire",
    "stone",
    "tree",
    "bird",
    "night",
    "day",
    "sun",
    "moon",
    "rain",
)
BAD: list[bytes] = [
    b'{"messages": [',
    b'{"messages": []}',
    b'{"messages": "\xff"}',
    b'{"messages": [{"role": "user", "content": "x"}], "n": 100000}',
    b'{"messages": [{"role": "user", "content": "x"}], "model": "nobody"}',
    b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"1": 1}}',
    b" " * (5 << 20),
]


def good_requests(count: int, longest: int) -> list[dict[str, Any]]:
    """Greedy chats of mixed sizes."""
    draw = random.Random(0)
    found = []
    for i in range(count):
        words = " ".join(draw.choice(WORDS) for _ in range(draw.choice((2, 8, 30))))
        found.append(
            {
                "messages": [{"role": "user", "content": f"{i}: tell me of {words}"}],
                "temperature": 0,
                "max_tokens": draw.randint(1, longest),
                "ignore_eos": True,
            }
        )
    return found


async def whole(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """The text of an answer; a full queue is tried again."""
    while True:
        answer = await client.post("/v1/chat/completions", json=body)
        if answer.status_code == 429:
            await asyncio.sleep(float(answer.headers["retry-after"]) / 4)
            continue
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["message"]["content"])


async def streamed(client: httpx.AsyncClient, body: dict[str, Any], leave: int | None) -> str:
    """The text of a stream; left after ``leave`` events, if told so."""
    while True:
        text, events = "", 0
        async with client.stream(
            "POST", "/v1/chat/completions", json={**body, "stream": True}
        ) as answer:
            if answer.status_code == 429:
                await asyncio.sleep(float(answer.headers["retry-after"]) / 4)
                continue
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return text
                if line.startswith("data: "):
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                    events += 1
                    if leave is not None and events > leave:
                        return ""
        raise RuntimeError("the stream ended without [DONE]")


class Soak:
    """One run against one server."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def one(
        self, draw: random.Random, bodies: list[dict[str, Any]], right: list[str]
    ) -> None:
        """A request of a random kind."""
        kind = draw.choices(
            ("whole", "streamed", "leaves", "impatient", "bad"), (30, 35, 15, 10, 10)
        )[0]
        self.seen[kind] += 1
        i = draw.randrange(len(bodies))
        if kind == "bad":
            answer = await self.client.post("/v1/chat/completions", content=draw.choice(BAD))
            if not 400 <= answer.status_code < 500:
                self.wrong.append(f"a bad request got {answer.status_code}")
        elif kind == "impatient":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(whole(self.client, bodies[i]), draw.uniform(0, 0.3))
        elif kind == "leaves":
            await streamed(self.client, bodies[i], draw.randrange(4))
        else:
            text = await (
                whole(self.client, bodies[i])
                if kind == "whole"
                else streamed(self.client, bodies[i], None)
            )
            if text != right[i]:
                self.wrong.append(f"request {i} ({kind}): {text!r} is not {right[i]!r}")

    async def run(self, count: int, connections: int, seed: int, *rest: Any) -> None:
        """``count`` of them, at most ``connections`` at once."""
        draw, places = random.Random(seed), asyncio.Semaphore(connections)

        async def guarded() -> None:
            async with places:
                try:
                    await self.one(draw, *rest)
                except Exception as error:
                    self.wrong.append(f"{type(error).__name__}: {error}")

        await asyncio.gather(*(guarded() for _ in range(count)))

    async def idle(self) -> dict[str, Any]:
        """Occupancy once nothing runs."""
        while True:
            found = (await self.client.get("/server_info")).json()["occupancy"]
            if found and not found["running"] and not found["waiting"]:
                return dict(found)
            await asyncio.sleep(0.1)


async def soak(url: str, pid: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run it; what was found."""
    pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    bodies = good_requests(options.distinct, options.max_tokens)
    async with connect(url, options.connections) as client:
        right = [await whole(client, body) for body in bodies]
    began = time.perf_counter()
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    marks = []
    for half in range(2):
        async with connect(url, options.connections) as client:
            run = Soak(client)
            await run.run(options.requests // 2, options.connections, half, bodies, right)
            occupancy = await run.idle()
        seen += run.seen
        wrong += run.wrong
        await asyncio.sleep(1)  # for connections to close
        marks.append(footprint(pids))
    return {
        "requests": dict(seen),
        "seconds": round(time.perf_counter() - began, 1),
        "wrong": wrong[:20],
        "wrong_count": len(wrong),
        "occupancy": occupancy,
        "after_half": marks[0],
        "after_all": marks[1],
    }


def connect(url: str, connections: int) -> httpx.AsyncClient:
    """A client of its own, whose connections close with it."""
    limits = httpx.Limits(max_connections=connections)
    return httpx.AsyncClient(base_url=url, timeout=600, limits=limits)


def footprint(pids: list[int]) -> dict[str, float]:
    """Resident MiB and open descriptors of the server's processes."""
    pages = sum(int(Path(f"/proc/{p}/statm").read_text().split()[1]) for p in pids)
    return {
        "memory_mib": round(pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20), 1),
        "descriptors": sum(len(os.listdir(f"/proc/{p}/fd")) for p in pids),
    }


def main() -> int:
    """Start a server, soak it, end it, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--distinct", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    arguments = ["--model-path", options.model, "--dtype", options.dtype]
    arguments += ["--max-running-requests", "16", "--max-queued-requests", "32"]
    if options.draft:
        arguments += ["--speculative-draft-model-path", options.draft]
    with tempfile.TemporaryDirectory() as folder:
        with ServerProcess(arguments, Path(folder) / "server.log") as server:
            try:
                server.wait_ready(READY_LIMIT)
            except ServerFailed as error:
                sys.exit("\n".join([*server.last_lines(), str(error)]))
            found = asyncio.run(soak(server.url, server.process.pid, options))
            code = server.stop()
        lines = faults(server.log)
    found |= {"model": Path(options.model).name, "draft": options.draft, "dtype": options.dtype}
    found |= {"connections": options.connections, "exit_code": code, "log": lines[:20]}
    print(json.dumps(found, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    flat = all(
        found["after_all"][name] <= 1.05 * found["after_half"][name]
        for name in ("memory_mib", "descriptors")
    )
    good = not found["wrong_count"] and not found["occupancy"]["held_pages"] and not code
    return 0 if good and flat and not lines else 1


def faults(log: str) -> list[str]:
    """The lines of a server's log that are no information."""
    return [line for line in log.splitlines() if not INFORMATION.match(line)]


if __name__ == "__main__":
    sys.exit(main())
