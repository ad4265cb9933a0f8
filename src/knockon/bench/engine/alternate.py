"""A trace that goes back and forth between few requests in flight and many.

A fixed verify width suits the one or the other. The requests are the same for every variant, so
the time that they take all in all says which one serves such a trace best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from knockon.bench.engine.load import LoadResult
from knockon.bench.engine.variant import Variant

# At high concurrency a step takes several times as long; so both phases last about alike.
LOW_ROUNDS = 3


@dataclass(frozen=True)
class Alternation:
    """One variant over the trace.

    Attributes:
        low, high: its two concurrencies.
        phases: by turns of low and high concurrency; each runs until its last request has ended.
    """

    variant: Variant
    low: int
    high: int
    phases: tuple[LoadResult, ...]

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all phases over their time."""
        return _speed(self.phases)

    @property
    def at_low(self) -> float:
        """The same of the phases of low concurrency."""
        return _speed(self.phases[::2])

    @property
    def at_high(self) -> float:
        """The same of the phases of high concurrency."""
        return _speed(self.phases[1::2])

    def widths(self, first: int) -> dict[int, float]:
        """Share of steps by width, of the phases of low (0) or high (1) concurrency."""
        return width_shares(phase.widths for phase in self.phases[first::2])


def phases_of(low: int, high: int, times: int) -> list[tuple[int, int]]:
    """Concurrency and number of requests of each phase."""
    return [(low, LOW_ROUNDS * low), (high, high)] * times


def alternate(
    variant: Variant, low: int, high: int, times: int, serve: Callable[[int, int], LoadResult]
) -> Alternation:
    """Run the trace.

    Args:
        times: how often it goes there and back.
        serve: serves so many requests, so many at a time.
    """
    results = [serve(concurrency, count) for concurrency, count in phases_of(low, high, times)]
    return Alternation(variant, low, high, tuple(results))


def width_shares(counts: Iterable[dict[int, int]]) -> dict[int, float]:
    """Share of steps by width."""
    total: Counter[int] = Counter()
    for each in counts:
        total.update(each)
    steps = sum(total.values())
    return {width: total[width] / steps for width in sorted(total)} if steps else {}


def _speed(phases: Iterable[LoadResult]) -> float:
    found = list(phases)
    return sum(phase.tokens for phase in found) / sum(phase.seconds for phase in found)
