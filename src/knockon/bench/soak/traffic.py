"""Requests of every sort, as a seed has them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from knockon.engine.sampling_params import SamplingParams

KINDS = ("greedy", "seeded", "penalised", "logprobs", "stop strings", "filtered")
_WEIGHTS = (40, 20, 10, 10, 10, 10)
_SHARED_PREFIXES = 8
_SHARED, _ABORTED = 0.4, 0.1  # shares of the requests
_STOPS = ("\n\n", ". The", " and", "?")


@dataclass(frozen=True)
class SoakRequest:
    """One request.

    Attributes:
        kind: one of ``KINDS``.
        prompt: token ids.
        abort_after: engine steps from its admission to the queue until it is aborted, if it is.
    """

    id: str
    kind: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    abort_after: int | None


class Traffic:
    """An endless row of requests.

    Lengths of prompts are log-uniform, those of outputs a third of the longest on average.

    Args:
        stream: token ids that prompts are cut from.
        longest_prompt, longest_output: tokens.
    """

    def __init__(
        self, stream: Sequence[int], longest_prompt: int, longest_output: int, seed: int
    ) -> None:
        self._rng = random.Random(f"{seed} traffic")
        self._stream = list(stream)
        self._longest_prompt = longest_prompt
        self._longest_output = longest_output
        self._number = 0
        self._prefixes = [self._cut(self._length(longest_prompt)) for _ in range(_SHARED_PREFIXES)]

    def next(self) -> SoakRequest:
        """The next one."""
        rng = self._rng
        number, self._number = self._number, self._number + 1
        kind = rng.choices(KINDS, _WEIGHTS)[0]
        prompt = self._cut(self._length(self._longest_prompt))
        if rng.random() < _SHARED:
            prompt = (rng.choice(self._prefixes) + prompt)[: self._longest_prompt]
        max_tokens = 1 + int((self._longest_output - 1) * rng.random() ** 2)
        aborted = rng.random() < _ABORTED
        return SoakRequest(
            id=str(number),
            kind=kind,
            prompt=prompt,
            params=self._params(kind, max_tokens),
            seed=rng.randrange(-(2**63), 2**63),
            abort_after=rng.randrange(1 + self._longest_output // 2) if aborted else None,
        )

    def wanted_in_flight(self, max_batch_size: int) -> int:
        """Requests to be kept waiting or running for a while: from one to twice what fits."""
        half = max(1, max_batch_size // 2)
        return self._rng.choice((1, half, max_batch_size, 2 * max_batch_size))

    def _params(self, kind: str, max_tokens: int) -> SamplingParams:
        rng = self._rng
        ignore_eos = rng.random() < 0.5
        if kind == "greedy":
            return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        if kind == "seeded":
            return SamplingParams(temperature=0.8, max_tokens=max_tokens, ignore_eos=ignore_eos)
        if kind == "penalised":
            return SamplingParams(
                temperature=rng.choice((0.0, 1.0)),
                repetition_penalty=1.2,
                presence_penalty=0.5,
                max_tokens=max_tokens,
                ignore_eos=ignore_eos,
            )
        if kind == "logprobs":
            return SamplingParams(temperature=0, logprobs=rng.randrange(4), max_tokens=max_tokens)
        if kind == "stop strings":
            stop = tuple(rng.sample(_STOPS, 2))
            return SamplingParams(temperature=0, stop=stop, max_tokens=max_tokens)
        return SamplingParams(
            temperature=1.0, top_p=0.9, top_k=40, min_p=0.01, max_tokens=max_tokens
        )

    def _length(self, longest: int) -> int:
        return min(longest, int(longest ** self._rng.random()))

    def _cut(self, count: int) -> list[int]:
        start = self._rng.randrange(max(1, len(self._stream) - count))
        return self._stream[start : start + count]
