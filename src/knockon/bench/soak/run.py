"""Sends the traffic for so many seconds and then lets everything end."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from knockon.bench.soak.traffic import SoakRequest, Traffic
from knockon.engine.engine import Engine
from knockon.engine.request import RequestOutput

_LOAD_LASTS = 2.0  # seconds until another number of requests is kept in flight
_MEMORY_EVERY = 0.5


@dataclass
class SoakRun:
    """What came of it.

    Attributes:
        sent: requests by kind.
        reasons: finished requests by finish reason.
        memory: seconds since the start and bytes of tensors on the GPU; empty on a CPU.
        samples: of the requests that ran to their end without penalties or noise, some at random.
        ended_in: seconds from the last request sent to the last one's end.
        left_over: outputs that came after all requests had ended.
    """

    seconds: float = 0.0
    sent: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    longest_step: float = 0.0
    memory: list[tuple[float, int]] = field(default_factory=list)
    samples: list[tuple[SoakRequest, RequestOutput]] = field(default_factory=list)
    ended_in: float = 0.0
    left_over: int = 0


class Soak:
    """A run over one engine.

    Args:
        sample: how many requests are kept for comparison.
        told: called now and then, with seconds gone and a line on how it stands.
    """

    def __init__(
        self,
        engine: Engine,
        traffic: Traffic,
        sample: int,
        seed: int,
        told: Callable[[float, str], None] = lambda seconds, text: None,
    ) -> None:
        self.engine = engine
        self.traffic = traffic
        self.result = SoakRun()
        self._sample = sample
        self._rng = random.Random(f"{seed} sample")
        self._told = told
        self._comparable = 0
        self._live: dict[str, SoakRequest] = {}
        self._aborts: dict[str, int] = {}
        self._device = engine.runner.target.device

    def run(self, seconds: float, requests: int = 0) -> SoakRun:
        """Send requests for so long, and so many at least, then end them all."""
        start = time.perf_counter()
        wanted = self.traffic.wanted_in_flight(self.engine.scheduler.max_batch_size)
        change, measure = _LOAD_LASTS, 0.0
        while (now := time.perf_counter() - start) < seconds or self.sent < requests:
            if now >= change:
                change = now + _LOAD_LASTS
                wanted = self.traffic.wanted_in_flight(self.engine.scheduler.max_batch_size)
            while len(self._live) < wanted:
                self._send()
            self._step()
            if now >= measure:
                measure = now + _MEMORY_EVERY
                self._measure(now)
        sent_until = time.perf_counter()
        while self._live:
            self._step()
        self.result.ended_in = time.perf_counter() - sent_until
        self.result.left_over = len(self.engine.step()) + len(self.engine.step())
        self.result.seconds = time.perf_counter() - start
        return self.result

    @property
    def sent(self) -> int:
        """Requests sent so far."""
        return sum(self.result.sent.values())

    def _send(self) -> None:
        request = self.traffic.next()
        self.engine.add(request.id, request.prompt, request.params, request.seed)
        self._live[request.id] = request
        self.result.sent[request.kind] += 1
        if request.abort_after is not None:
            self._aborts[request.id] = self.result.steps + request.abort_after

    def _step(self) -> None:
        for request_id in [i for i, step in self._aborts.items() if step <= self.result.steps]:
            aborted = self.engine.abort(request_id)
            assert aborted is not None, "a request is aborted while it lives"
            self._end(request_id, aborted)
        start = time.perf_counter()
        outputs = self.engine.step()
        self.result.longest_step = max(self.result.longest_step, time.perf_counter() - start)
        self.result.steps += 1
        for output in outputs:
            if output.finished is not None:
                self._end(output.request_id, output.finished)

    def _end(self, request_id: str, output: RequestOutput) -> None:
        request = self._live.pop(request_id)
        self._aborts.pop(request_id, None)
        result = self.result
        result.reasons[output.finish_reason] += 1
        result.tokens += len(output.token_ids)
        result.prompt_tokens += len(request.prompt)
        result.cached_tokens += output.metrics.cached_tokens
        result.preemptions += output.metrics.preemptions
        plain = request.params.greedy and not request.params.needs_history
        if output.finish_reason == "abort" or not plain:
            return
        # Every one of them is as likely to be kept as any other (reservoir sampling).
        self._comparable += 1
        if len(result.samples) < self._sample:
            result.samples.append((request, output))
        elif (place := self._rng.randrange(self._comparable)) < self._sample:
            result.samples[place] = (request, output)

    def _measure(self, now: float) -> None:
        if self._device.type == "cuda":
            self.result.memory.append((now, torch.cuda.memory_allocated(self._device)))
        r = self.result
        self._told(now, f"{self.sent} requests, {r.tokens} tokens, {r.steps} steps")
