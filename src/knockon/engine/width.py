"""How many positions the target verifies in the next step: fixed, or chosen from what was measured.

The choice is arithmetic on counts and recorded times. It reads no clock and draws nothing at
random, so that a recorded trace replays to the same widths, told of its steps as late as then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from knockon.engine.acceptance_rates import AcceptanceByPosition
from knockon.engine.step_times import DEFAULT_BUCKETS, StepTimes

AUTO = "auto"
AUTO_WIDTHS = (1, 4, 8, 12, 16)
# A width is left only for one that promises this much more; near-equal widths do not alternate.
HYSTERESIS = 0.01
# Share of the time that may be lost to steps run at other widths than the best.
PROBE_BUDGET = 0.005
# Unspent budget is kept for about one dear probe, not for a row of them.
PROBE_RESERVE_STEPS = 2.0
# A width that promises less than this much under the best is its rival, and is probed once it has
# not been run for so many steps: which of the two is better hangs on times that must not grow old.
RIVAL_MARGIN = 0.05
RIVAL_STEPS = 32


class WidthPolicy(Protocol):
    """Decides the verify width of each decode step.

    Attributes:
        name: the width, or ``"auto"``.
        widths: every width that it may choose, ascending.
    """

    @property
    def name(self) -> int | str: ...

    @property
    def widths(self) -> tuple[int, ...]: ...

    def choose(self, batch: int, speculating: int) -> int:
        """The width for the next step. Changes nothing.

        Args:
            batch: requests in it.
            speculating: those of them that may gain more than a token, at least one.
        """
        ...

    def record(self, batch: int, width: int, accept_lengths: Sequence[int], seconds: float) -> None:
        """Learn from a step: the width run, the accept length of each request that speculates,
        and the step's time.

        Steps are told in the order in which they ran; later ones may have been chosen already.
        """
        ...


class FixedWidth:
    """The same width always."""

    def __init__(self, width: int) -> None:
        self.name = width
        self.widths = (width,)

    def choose(self, batch: int, speculating: int) -> int:
        return self.widths[0]

    def record(self, batch: int, width: int, accept_lengths: Sequence[int], seconds: float) -> None:
        return


class WidthRate(NamedTuple):
    """What a width promises: mean tokens of a request in a step, and seconds a step."""

    width: int
    tokens: float
    seconds: float

    @property
    def throughput(self) -> float:
        """Mean tokens a second of a request."""
        return self.tokens / self.seconds


def auto_widths(block_size: int) -> tuple[int, ...]:
    """The widths that ``auto`` chooses from: those of ``AUTO_WIDTHS`` and the whole block."""
    return tuple(sorted({w for w in AUTO_WIDTHS if w < block_size} | {block_size}))


def rate_widths(
    batch: int,
    speculating: int,
    acceptance: AcceptanceByPosition,
    times: StepTimes,
    widths: Sequence[int],
) -> list[WidthRate]:
    """Every width's promise for a batch; none while no step has been timed.

    A request that does not speculate gains one token at whatever width.
    """
    expected = acceptance.expected_tokens()
    rates = []
    for width in widths:
        seconds = times.seconds(batch, width)
        if seconds is not None:
            tokens = (batch - speculating + speculating * expected[width - 1]) / batch
            rates.append(WidthRate(width, tokens, seconds))
    return rates


def best_rate(rates: Sequence[WidthRate], last: int | None) -> WidthRate:
    """The width of the most tokens a second; the last one again if it comes near."""
    best = max(rates, key=lambda rate: (rate.throughput, -rate.width))
    for rate in rates:
        if rate.width == last and rate.throughput * (1 + HYSTERESIS) >= best.throughput:
            return rate
    return best


def probe_loss(probe: WidthRate, best: WidthRate) -> float:
    """Seconds lost by one step at ``probe``: its time less what its tokens take at the best."""
    return max(0.0, probe.seconds - probe.tokens / best.throughput)


def choose_width(
    rates: Sequence[WidthRate], last: int | None, probe: int | None, budget: float
) -> int:
    """The best width, or the one to be probed where the budget pays for what that may lose.

    Args:
        rates: from :func:`rate_widths`, at least one.
        last: the best width when this bucket last ran.
        probe: the width due to be probed, if any.
        budget: seconds that may be lost.
    """
    best = best_rate(rates, last)
    for rate in rates:
        if rate.width == probe and probe_loss(rate, best) <= budget:
            return rate.width
    return best.width


class AdaptiveWidth:
    """Chooses the width of the most expected tokens a second, bucket by bucket.

    Expected tokens come from :class:`AcceptanceByPosition`, times from :class:`StepTimes`. Counts
    gathered at a narrow width are silent on later positions, and a time that is not measured grows
    old; so other widths are probed, a near rival first, else the widest and the one longest not run
    by turns, as often as ``PROBE_BUDGET`` pays for. In a bucket without seeds the widest and the
    narrowest are timed before anything is chosen, and those between are inferred.

    Args:
        widths: those to choose from, ascending.
        buckets: batch sizes that are timed apart.
        seeds: seconds by ``(bucket, width)`` measured at start, if any.
    """

    name = AUTO

    def __init__(
        self,
        widths: Sequence[int],
        buckets: Sequence[int] = DEFAULT_BUCKETS,
        seeds: Mapping[tuple[int, int], float] | None = None,
    ) -> None:
        self.widths = tuple(widths)
        self.acceptance = AcceptanceByPosition(self.widths[-1])
        self.times = StepTimes(widths, buckets, seeds)
        self._best: dict[int, int] = {}
        self._ran: dict[int, int] = {}
        self._probes: dict[int, int] = {}
        self._budgets: dict[int, float] = {}
        self._rated: dict[tuple[int, int], list[WidthRate]] = {}

    def choose(self, batch: int, speculating: int) -> int:
        untimed = self._untimed(batch)
        if untimed is not None:
            return untimed
        bucket = self.times.bucket(batch)
        rates = self._rate(batch, speculating)
        due, budget = self._due(bucket, rates), self._budgets.get(bucket, 0.0)
        return choose_width(rates, self._best.get(bucket), due, budget)

    def record(self, batch: int, width: int, accept_lengths: Sequence[int], seconds: float) -> None:
        bucket = self.times.bucket(batch)
        if self._untimed(batch) is None:
            rates = self._rate(batch, len(accept_lengths))
            best = best_rate(rates, self._best.get(bucket))
            self._best[bucket] = best.width
            self._pay(bucket, width, best, rates)
        self._ran[bucket] = width
        self.acceptance.update(width, accept_lengths)
        self.times.update(batch, width, seconds)
        self._rated.clear()

    def _rate(self, batch: int, speculating: int) -> list[WidthRate]:
        """Every width's promise, worked out once between two records."""
        asked = (batch, speculating)
        if asked not in self._rated:
            self._rated[asked] = rate_widths(*asked, self.acceptance, self.times, self.widths)
        return self._rated[asked]

    def _untimed(self, batch: int) -> int | None:
        """An end of the range of widths that must be timed before the bucket can be judged."""
        for width in (self.widths[-1], self.widths[0]):
            if not self.times.trusted(batch, width):
                return width
        return None

    def _due(self, bucket: int, rates: Sequence[WidthRate]) -> int | None:
        """The width to probe next: a rival; else, by turns, the widest and the longest not run."""
        best = self._best.get(bucket)
        others = [width for width in self.widths if width != best]
        if not others:
            return None
        rival = self._rival(bucket, rates)
        if rival is not None:
            return rival
        if self._probes.get(bucket, 0) % 2 == 0 and others[-1] == self.widths[-1]:
            return others[-1]
        return min(others, key=lambda width: (self.times.last_update(bucket, width), -width))

    def _rival(self, bucket: int, rates: Sequence[WidthRate]) -> int | None:
        """The width that comes nearest to the best, where it does and was not run of late."""
        best = [rate for rate in rates if rate.width == self._best.get(bucket)]
        others = [rate for rate in rates if rate not in best]
        if not best or not others:
            return None
        rival = max(others, key=lambda rate: rate.throughput)
        near = rival.throughput >= (1 - RIVAL_MARGIN) * best[0].throughput
        last = self.times.last_update(bucket, rival.width)
        fresh = last > 0 and self.times.updates - last < RIVAL_STEPS
        return rival.width if near and not fresh else None

    def _pay(self, bucket: int, width: int, best: WidthRate, rates: Sequence[WidthRate]) -> None:
        """Add a step's share to its bucket's budget, or take off it what a probe may have lost."""
        budget = self._budgets.get(bucket, 0.0)
        if width == best.width:
            budget += PROBE_BUDGET * best.seconds
        else:
            # A rival takes nobody's turn, and steps in flight, chosen before a probe is told, one.
            if width not in (self._rival(bucket, rates), self._ran.get(bucket)):
                self._probes[bucket] = self._probes.get(bucket, 0) + 1
            budget -= sum(probe_loss(rate, best) for rate in rates if rate.width == width)
        reserve = PROBE_RESERVE_STEPS * max(rate.seconds for rate in rates)
        self._budgets[bucket] = min(max(budget, -reserve), reserve)
