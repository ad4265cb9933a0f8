"""Requests of one length, so many in flight at a time: how fast the engine serves them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from knockon.engine.engine import Engine
from knockon.engine.request import RequestMetrics
from knockon.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class LoadResult:
    """What one run gave; times in seconds.

    Attributes:
        tokens: output tokens of all requests.
        seconds: from the first request to the last token.
        full_step: mean of the decode steps taken with every place filled and no prefill in or
            before them; ``None`` where there was none.
        full_steps: how many those were.
        time_to_first_token: mean over requests, from when one was added.
        time_per_token: mean over requests, of the tokens after the first.
        accept_length: tokens kept per verification.
        widths: decode steps by verify width.
    """

    tokens: int
    seconds: float
    full_step: float | None
    full_steps: int
    time_to_first_token: float
    time_per_token: float
    accept_length: float
    widths: dict[int, int]

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole time, prefill included."""
        return self.tokens / self.seconds


class ClosedLoop:
    """Keeps ``concurrency`` requests in flight: the next is added when one ends.

    Args:
        seeds: of the requests, one each; there are as many requests.
        prompts: token ids, as many.
        ended: called when a request has ended.
        temperature: 0 is greedy.
    """

    def __init__(
        self,
        engine: Engine,
        concurrency: int,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        output_len: int,
        ended: Callable[[], None] = lambda: None,
        temperature: float = 0.0,
    ) -> None:
        self.engine = engine
        self.concurrency = concurrency
        self.finished: list[tuple[int, RequestMetrics]] = []
        self._params = SamplingParams(
            temperature=temperature, max_tokens=output_len, ignore_eos=True
        )
        self._waiting = list(zip(prompts, seeds, strict=True))
        self._ended = ended
        self._added = 0
        for _ in range(min(concurrency, len(self._waiting))):
            self._add()

    @property
    def full(self) -> bool:
        """Whether the next step decodes for every place and prefills for none.

        A request that what is in flight will surely end decodes no more.
        """
        scheduler = self.engine.scheduler
        decoding = len(scheduler.decoding().requests)
        return decoding == len(scheduler.running) == self.concurrency

    def step(self) -> None:
        """One engine step."""
        for output in self.engine.step():
            if output.finished is not None:
                self.finished.append((len(output.finished.token_ids), output.finished.metrics))
                self._ended()
                if self._added < len(self._waiting):
                    self._add()

    def run(self) -> list[float]:
        """Until the last request has ended; the seconds of every full step after a full one.

        A call may wait for the step before, so after a prefill it takes longer.
        """
        full_steps = []
        was_full = False
        while self.engine.has_unfinished:
            full, start = self.full, time.perf_counter()
            self.step()
            if full and was_full:
                full_steps.append(time.perf_counter() - start)
            was_full = full
        return full_steps

    def abandon(self) -> None:
        """Abort what is in flight."""
        for number in range(self._added):
            self.engine.abort(str(number))

    def _add(self) -> None:
        prompt, seed = self._waiting[self._added]
        self.engine.add(str(self._added), prompt, self._params, seed, stream=False)
        self._added += 1


def serve(
    engine: Engine,
    concurrency: int,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    output_len: int,
    ended: Callable[[], None] = lambda: None,
    temperature: float = 0.0,
) -> LoadResult:
    """Serve all the requests and say how fast it went."""
    before = engine.metrics().widths
    synchronise(engine)
    start = time.perf_counter()
    loop = ClosedLoop(engine, concurrency, prompts, seeds, output_len, ended, temperature)
    full_steps = loop.run()
    seconds = time.perf_counter() - start
    found = loop.finished
    lengths = [length for _, metrics in found for length in metrics.accept_lengths]
    return LoadResult(
        tokens=sum(count for count, _ in found),
        seconds=seconds,
        full_step=fmean(full_steps) if full_steps else None,
        full_steps=len(full_steps),
        time_to_first_token=fmean(metrics.time_to_first_token for _, metrics in found),
        time_per_token=fmean(
            (metrics.time_total - metrics.time_to_first_token) / (count - 1)
            for count, metrics in found
        ),
        accept_length=fmean(lengths),
        widths=dict(Counter(engine.metrics().widths) - Counter(before)),
    )


def synchronise(engine: Engine) -> None:
    """Wait for the device."""
    device = engine.runner.target.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_prompts(
    count: int, length: int, vocab_size: int, generator: torch.Generator
) -> list[list[int]]:
    """Token ids, every prompt another, so that none is found in the prefix cache."""
    ids: list[list[int]] = torch.randint(vocab_size, (count, length), generator=generator).tolist()
    return ids
