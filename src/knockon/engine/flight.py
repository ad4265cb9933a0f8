"""Forwards in flight: launched, their tokens not yet read by the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from knockon.drafters.base import Drafter
from knockon.engine.request import Request
from knockon.engine.step import Step
from knockon.models.target import Target


class Gains(NamedTuple):
    """Tokens that a forward gave its requests.

    Attributes:
        requests: a row each.
        tokens: those of each, as gained, before any stop is looked for.
        logits: ``[>= len(requests), n, V]`` with ``[r, i]`` the one that chose token ``i`` of
            request ``r``; ``None`` where no request asked for log-probabilities.
        verified: whether they are a verification's, and enter the accept lengths.
    """

    requests: Sequence[Request]
    tokens: list[list[int]]
    logits: Tensor | None
    verified: bool


class Flight(Protocol):
    """A launched step.

    Attributes:
        seconds: what its verification took, known once it has landed; 0 without one.
        parts: of those, what each of :data:`~knockon.engine.part_times.PARTS` took; empty where
            they cannot be told apart: on a GPU a step is launched as a whole.
    """

    seconds: float
    parts: Sequence[float]

    def land(self) -> list[Gains]:
        """Wait for the step, and tell what each of its forwards gave, prefill first."""
        ...


class Runner(Protocol):
    """Runs the steps that a scheduler decides on.

    Attributes:
        lag: how many steps may be in flight when the next one is launched.
        target, drafter: what it runs.
        page_size: positions a page.
    """

    lag: int
    target: Target
    drafter: Drafter | None
    page_size: int

    def launch(self, step: Step, width: int) -> Flight:
        """Run a step's prefill chunks, then one speculative step of its decoding requests.

        Args:
            width: the verify width; 1 decodes without speculation.
        """
        ...

    def copy_state(self, source: int, target: int) -> None:
        """What recurrent layers keep in one slot to another, after all that was launched."""
        ...


@dataclass
class Landed:
    """A step whose tokens the host has already."""

    gains: list[Gains] = field(default_factory=list)
    seconds: float = 0.0
    parts: Sequence[float] = ()

    def land(self) -> list[Gains]:
        """What each forward gave."""
        return self.gains


class Awaited(NamedTuple):
    """Tokens on their way to the host.

    Attributes:
        requests: a row each.
        packed: int64 ``[>= len(requests), w + 1]`` in host memory: tokens, then how many were
            gained.
        logits: ``[>= len(requests), w, V]``, where any of the requests wants log-probabilities.
        verified: see :class:`Gains`.
    """

    requests: Sequence[Request]
    packed: Tensor
    logits: Tensor | None
    verified: bool


class Clock:
    """Times what a device does between two points of its stream, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._began = torch.cuda.Event(enable_timing=True)
            self._ended = torch.cuda.Event(enable_timing=True)
        self._seconds = 0.0

    def start(self) -> None:
        """From here."""
        if self._on_gpu:
            self._began.record()
        self._seconds = time.perf_counter()

    def stop(self) -> None:
        """To here."""
        if self._on_gpu:
            self._ended.record()
        self._seconds = time.perf_counter() - self._seconds

    def read(self) -> float:
        """Wait for the second point; seconds."""
        if not self._on_gpu:
            return self._seconds
        self._ended.synchronize()
        milliseconds: float = self._began.elapsed_time(self._ended)
        return milliseconds / 1000


class PipelinedFlight:
    """A step whose tokens are copied to pinned memory behind it.

    Args:
        parts: what each of its forwards gave.
        clock: stopped behind the last of them.
    """

    def __init__(self, parts: Sequence[Awaited], clock: Clock) -> None:
        self._parts = parts
        self._clock = clock
        self.seconds = 0.0
        self.parts: Sequence[float] = ()

    def land(self) -> list[Gains]:
        """Wait for the copies, and read them."""
        self.seconds = self._clock.read()
        return [
            Gains(
                requests,
                [row[: row[-1]] for row in packed[: len(requests)].tolist()],
                logits,
                verified,
            )
            for requests, packed, logits, verified in self._parts
        ]
