"""What a decode step takes by batch and verify width: measured, or inferred from what was."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GAIN = 0.2
# Host work and reading the context cost all widths alike: of a change seen at one width, this
# much is taken to have happened to the others of its bucket too.
SHARED_DRIFT = 0.5
# Steps of a pair before its time is trusted: the first may pay for warming up. A seed is trusted.
TRUSTED_SAMPLES = 2
DEFAULT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass
class _Timing:
    """A running time, and the raw sample before the next."""

    seconds: float
    previous: float
    samples: int


class StepTimes:
    """Running step time, in seconds, of each batch bucket and width.

    Args:
        widths: the widths that may be run.
        buckets: batch sizes, ascending; a batch counts towards the smallest that holds it, and one
            above them all towards the last.
        seeds: seconds measured at start by ``(bucket, width)``, if any.
    """

    def __init__(
        self,
        widths: Sequence[int],
        buckets: Sequence[int] = DEFAULT_BUCKETS,
        seeds: Mapping[tuple[int, int], float] | None = None,
    ) -> None:
        self.widths = tuple(widths)
        self.buckets = tuple(buckets)
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
        bucket = self.bucket(batch)
        timing = self._timings.get((bucket, width))
        if timing is None:
            self._timings[bucket, width] = _Timing(seconds, seconds, 1)
            return
        if timing.samples < TRUSTED_SAMPLES:
            moved = min(seconds, timing.seconds) - timing.seconds
        else:
            # The median of three: one slow step alone moves nothing.
            middle = sorted((timing.seconds, timing.previous, seconds))[1]
            moved = GAIN * (middle - timing.seconds)
            for other in self.widths:
                if other != width and (bucket, other) in self._timings:
                    shared = self._timings[bucket, other]
                    # Never by more than its own share: a time stays positive.
                    part = moved * min(1.0, shared.seconds / timing.seconds)
                    shared.seconds += SHARED_DRIFT * part
        timing.seconds += moved
        timing.previous = seconds
        timing.samples += 1

    def seconds(self, batch: int, width: int) -> float | None:
        """A step's time; inferred where unmeasured, ``None`` while nothing at all is known.

        Inferred times are linear in rows (bucket times width) between known ones and never fall
        with them: from the bucket's own widths if two are known, else from all pairs. Below the
        known rows the least is taken; above them the last slope goes on.
        """
        bucket = self.bucket(batch)
        known = self._timings.get((bucket, width))
        if known is not None:
            return known.seconds
        own = [pair for pair in self._timings if pair[0] == bucket]
        pairs = own if len(own) > 1 else list(self._timings)
        points = _rising([(b * w, self._timings[b, w].seconds) for b, w in pairs])
        return _interpolate(points, bucket * width) if points else None


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
