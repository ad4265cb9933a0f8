"""What a decode step takes by batch and verify width: measured, or inferred from what was."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GAIN = 0.2
# Host work and reading the context cost all widths alike: of a change seen at one width, this
# much is taken to have happened to the others of its bucket too.
SHARED_DRIFT = 0.5
# A width that was run once or less in so many steps is believed by this much, and what it shows
# is no drift: its time was wrong, or grew old.
STALE_STEPS, STALE_GAIN = 16, 0.5
# Steps of a pair before its time is trusted: the first may pay for warming up. A seed is trusted.
TRUSTED_SAMPLES = 2
DEFAULT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass
class _Timing:
    """A running time, the raw sample before the next, and which updates were the last two."""

    seconds: float
    previous: float
    samples: int
    last: tuple[int, int] = (0, 0)


class StepTimes:
    """Running step time, in seconds, of each batch bucket and width.

    Args:
        widths: the widths that may be run.
        buckets: batch sizes, ascending; a batch counts towards the smallest that holds it, and one
            above them all towards the last.
        seeds: seconds measured at start by ``(bucket, width)``, if any.

    Attributes:
        updates: steps taken in so far.
    """

    def __init__(
        self,
        widths: Sequence[int],
        buckets: Sequence[int] = DEFAULT_BUCKETS,
        seeds: Mapping[tuple[int, int], float] | None = None,
    ) -> None:
        self.widths = tuple(widths)
        self.buckets = tuple(buckets)
        self.updates = 0
        self._timings = {
            pair: _Timing(seconds, seconds, TRUSTED_SAMPLES)
            for pair, seconds in (seeds or {}).items()
        }

    def bucket(self, batch: int) -> int:
        """The bucket of a batch."""
        return self.buckets[min(bisect_left(self.buckets, batch), len(self.buckets) - 1)]

    def trusted(self, batch: int, width: int) -> bool:
        """Whether a pair has a seed or enough measured steps."""
        timing = self._timings.get((self.bucket(batch), width))
        return timing is not None and timing.samples >= TRUSTED_SAMPLES

    def update(self, batch: int, width: int, seconds: float) -> None:
        """Take in one measured step."""
        self.updates += 1
        bucket = self.bucket(batch)
        timing = self._timings.get((bucket, width))
        if timing is None:
            self._timings[bucket, width] = _Timing(
                seconds, seconds, 1, (self.updates, self.updates)
            )
            return
        if timing.samples < TRUSTED_SAMPLES:
            moved = min(seconds, timing.seconds) - timing.seconds
        else:
            # The median of three: one slow step alone moves nothing.
            middle = sorted((timing.seconds, timing.previous, seconds))[1]
            stale = self.updates - timing.last[0] >= STALE_STEPS
            moved = (STALE_GAIN if stale else GAIN) * (middle - timing.seconds)
            for other in self.widths if not stale else ():
                if other != width and (bucket, other) in self._timings:
                    shared = self._timings[bucket, other]
                    # Never by more than its own share: a time stays positive.
                    part = moved * min(1.0, shared.seconds / timing.seconds)
                    shared.seconds += SHARED_DRIFT * part
        timing.seconds += moved
        timing.previous = seconds
        timing.samples += 1
        timing.last = (timing.last[1], self.updates)

    def last_update(self, batch: int, width: int) -> int:
        """Which of the updates was the last of the batch's bucket and that width; 0 for none."""
        timing = self._timings.get((self.bucket(batch), width))
        return 0 if timing is None else timing.last[1]

    def seconds(self, batch: int, width: int) -> float | None:
        """A step's time; inferred where not trusted yet, ``None`` while nothing at all is known.

        Inferred times are linear in rows (bucket times width) between known ones and never fall
        with them: from the bucket's own widths if two are known, else from all pairs. Below the
        known rows the least is taken; above them the last slope goes on.
        """
        bucket = self.bucket(batch)
        known = self._timings.get((bucket, width))
        if known is not None and known.samples >= TRUSTED_SAMPLES:
            return known.seconds
        # One slow first step must not keep a width from being tried again.
        trusted = [pair for pair, t in self._timings.items() if t.samples >= TRUSTED_SAMPLES]
        all_pairs = trusted or list(self._timings)
        own = [pair for pair in all_pairs if pair[0] == bucket]
        pairs = own if len(own) > 1 else all_pairs
        points = _rising([(b * w, self._timings[b, w].seconds) for b, w in pairs])
        if not points:
            return None
        inferred = _interpolate(points, bucket * width)
        return inferred if known is None else min(inferred, known.seconds)


def _rising(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Points by rows, one for each number of rows, made never to fall."""
    rising: dict[int, float] = {}
    highest = 0.0
    for rows, seconds in sorted(points):
        rising[rows] = highest = max(highest, seconds)
    return list(rising.items())


def _interpolate(points: Sequence[tuple[int, float]], rows: int) -> float:
    if rows <= points[0][0] or len(points) == 1:
        return points[0][1]
    at = min(bisect_left(points, (rows,)), len(points) - 1)
    (low, first), (high, last) = points[at - 1], points[at]
    return first + (last - first) * (rows - low) / (high - low)
