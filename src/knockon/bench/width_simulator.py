"""Decoding without a model: step times from a table, accept lengths drawn from given rates."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from operator import mul
from statistics import fmean

from knockon.bench.width_trace import TracedWidth, WidthStep
from knockon.engine.acceptance_rates import expected_tokens
from knockon.engine.width import WidthPolicy

# Relative spread of a step's time, and steps that something else on the machine held up.
TIME_NOISE = 0.02
HELD_UP_SHARE, HELD_UP_FACTOR = 0.005, 5.0


@dataclass(frozen=True)
class RequestClass:
    """Requests of one kind.

    Attributes:
        rates: probability that position ``i = 1, 2, ...`` is accepted where those before it were.
    """

    name: str
    rates: tuple[float, ...]

    def accept_length(self, width: int, draw: float) -> int:
        """The accept length, bonus included, that a uniform draw stands for."""
        # Survival falls with the position: accepted are those that survive more often than draw.
        return 1 + bisect_left(self._falling, -draw, 0, min(width - 1, len(self.rates)))

    @cached_property
    def _falling(self) -> list[float]:
        return [-survival for survival in accumulate(self.rates, mul)]


@dataclass(frozen=True)
class StepTable:
    """Step times by batch and width, linear between the points given.

    Attributes:
        points: seconds by ``(batch, width)``; the same widths, two above 1 at least, at each batch.
    """

    name: str
    points: Mapping[tuple[int, int], float]

    def seconds(self, batch: int, width: int) -> float:
        """A step's time. Width 1 drafts nothing: no other width is inferred from it."""
        known = sorted({w for _, w in self.points})
        if width in known:
            batches = sorted({b for b, _ in self.points})
            return _line([(b, self.points[b, width]) for b in batches], batch)
        return _line([(w, self.seconds(batch, w)) for w in known if w > 1], width)


def _line(points: Sequence[tuple[int, float]], at: int) -> float:
    """Piecewise linear through at least two points; the first and last pieces go on outside."""
    pieces = list(pairwise(points))
    (low, first), (high, last) = next((p for p in pieces if at <= p[1][0]), pieces[-1])
    return first + (last - first) * (at - low) / (high - low)


def fit_rates(at_8: float, at_16: float) -> tuple[float, ...]:
    """The 15 rates, one value up to position 7 and one beyond, of two mean accept lengths."""

    def solve(count: int, wanted: float, head: tuple[float, ...]) -> float:
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            enough = expected_tokens((*head, *[middle] * count))[-1] >= wanted
            low, high = (low, middle) if enough else (middle, high)
        return high

    head = (solve(7, at_8, ()),) * 7
    return (*head, *[solve(8, at_16, head)] * 8)


@dataclass(frozen=True)
class Phase:
    """A stretch of a trace: requests at a time, and tokens to be made before the next."""

    concurrency: int
    tokens: int


@dataclass(frozen=True)
class Simulation:
    """What a policy made of a trace."""

    steps: list[WidthStep]

    @property
    def tokens_per_second(self) -> float:
        """All tokens over all time."""
        return sum(s.tokens for s in self.steps) / sum(s.seconds for s in self.steps)

    def widths(self) -> dict[int, int]:
        """Steps by width."""
        counts: dict[int, int] = {}
        for step in self.steps:
            counts[step.width] = counts.get(step.width, 0) + 1
        return dict(sorted(counts.items()))


class BestKnown:
    """The oracle: the best width for each batch by the true rates and times, always."""

    name = "oracle"

    def __init__(
        self, widths: Sequence[int], table: StepTable, classes: Sequence[RequestClass]
    ) -> None:
        self.widths = tuple(widths)
        self._table = table
        each = [expected_tokens(kind.rates) for kind in classes]
        self._tokens = [fmean(values) for values in zip(*each, strict=True)]

    def throughput(self, batch: int, width: int) -> float:
        """Expected tokens a second of the whole batch."""
        return batch * self._tokens[width - 1] / self._table.seconds(batch, width)

    def choose(self, batch: int, speculating: int) -> int:
        return max(self.widths, key=lambda width: self.throughput(batch, width))

    def record(self, batch: int, width: int, accept_lengths: Sequence[int], seconds: float) -> None:
        return


def simulate(
    policy: WidthPolicy,
    table: StepTable,
    classes: Sequence[RequestClass],
    phases: Sequence[Phase],
    *,
    seed: int = 0,
    request_tokens: int = 512,
) -> Simulation:
    """Run a policy over a trace.

    Every slot of a batch serves one request of ``request_tokens`` after another, each of a class
    drawn evenly. Which classes follow one another, and the noise, are the same for every policy.
    """
    traced = TracedWidth(policy)
    noise = random.Random(f"{seed} time")
    for number, phase in enumerate(phases):
        slots = [
            _Slot(f"{seed} {number} {slot}", classes, request_tokens)
            for slot in range(phase.concurrency)
        ]
        made = 0
        while made < phase.tokens:
            width = traced.choose(phase.concurrency, phase.concurrency)
            gained = [slot.step(width) for slot in slots]
            held_up = HELD_UP_FACTOR if noise.random() < HELD_UP_SHARE else 1.0
            factor = held_up * max(0.5, noise.gauss(1, TIME_NOISE))
            seconds = factor * table.seconds(phase.concurrency, width)
            traced.record(phase.concurrency, width, gained, seconds)
            made += sum(gained)
    return Simulation(traced.steps)


class _Slot:
    """One request after another."""

    def __init__(self, name: str, classes: Sequence[RequestClass], request_tokens: int) -> None:
        self._source = random.Random(f"{name} class")
        self._draws = random.Random(f"{name} accept")
        self._classes = classes
        self._request_tokens = request_tokens
        self._left = 0

    def step(self, width: int) -> int:
        if self._left <= 0:
            self._class = self._source.choice(self._classes)
            self._left += self._request_tokens
        gained = self._class.accept_length(width, self._draws.random())
        self._left -= gained
        return gained
