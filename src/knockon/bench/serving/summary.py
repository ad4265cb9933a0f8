"""The numbers of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from knockon.bench.serving.request import Timed


@dataclass(frozen=True)
class Spread:
    """Milliseconds."""

    mean: float
    median: float
    p99: float


@dataclass(frozen=True)
class Summary:
    """Of the requests that succeeded.

    Attributes:
        duration: seconds from the first request sent to the last answer's end.
        accept_length: tokens kept a verification, over all requests; ``None`` where none was told.
        concurrency: requests under way on average.
    """

    completed: int
    failed: int
    duration: float
    prompt_tokens: int
    output_tokens: int
    request_throughput: float
    output_throughput: float
    total_throughput: float
    concurrency: float
    e2e: Spread
    ttft: Spread
    tpot: Spread
    itl: Spread
    accept_length: float | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def summarise(results: Sequence[Timed], duration: float) -> Summary:
    """Put a run together."""
    good = [each for each in results if not each.error]
    prompt = sum(each.prompt_tokens for each in good)
    output = sum(each.output_tokens for each in good)
    verifications = sum(each.verifications for each in good)
    return Summary(
        completed=len(good),
        failed=len(results) - len(good),
        duration=duration,
        prompt_tokens=prompt,
        output_tokens=output,
        request_throughput=len(good) / duration,
        output_throughput=output / duration,
        total_throughput=(prompt + output) / duration,
        concurrency=sum(each.e2e for each in good) / duration,
        e2e=spread([each.e2e for each in good]),
        ttft=spread([each.ttft for each in good]),
        tpot=spread([each.tpot for each in good if each.tpot is not None]),
        itl=spread([gap for each in good for gap in each.gaps]),
        accept_length=sum(each.kept for each in good) / verifications if verifications else None,
    )


def spread(seconds: Sequence[float]) -> Spread:
    """Mean, median and 99th percentile in milliseconds; zeros of nothing."""
    if not seconds:
        return Spread(0.0, 0.0, 0.0)
    found = np.asarray(seconds) * 1000
    return Spread(float(found.mean()), float(np.median(found)), float(np.percentile(found, 99)))
