"""CUDA graphs: forwards captured once and launched as a whole, where they can be."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from knockon.engine.graph_capture import CaptureFailed, record, warm_up
from knockon.engine.sampling import DrawKind

logger = logging.getLogger(__name__)


class StepKey(NamedTuple):
    """What the graph of a speculative step, from draft to commit, is made for."""

    bucket: int
    width: int
    kind: DrawKind

    def __str__(self) -> str:
        on = (self.kind.max_top_k > 0, self.kind.any_top_p, self.kind.any_min_p)
        names = [name for name, is_on in zip(("top-k", "top-p", "min-p"), on, strict=True) if is_on]
        kind = "greedy" if self.kind.all_greedy else f"drawn by {'+'.join(names) or 'temperature'}"
        return f"a step of {self.bucket} requests, verify width {self.width}, {kind}"


class PrefillKey(NamedTuple):
    """What the graph of a prefill is made for: so many requests, so many rows of each."""

    requests: int
    rows: int

    def __str__(self) -> str:
        return f"a prefill of {self.requests} x {self.rows} rows"


class Captured:
    """A graph and where it leaves its result."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Any) -> None:
        self._graph = graph
        self._result = result

    def replay(self) -> Any:
        """Run it; the result is overwritten by the next replay of any graph of the same pool."""
        self._graph.replay()
        return self._result


class ByHand:
    """Stands for a graph that could not be captured: its kernels are launched one by one."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run

    def replay(self) -> Any:
        """Run it, on what its inputs are now."""
        return self._run()


class Graphs:
    """Makes graphs and keeps them, in one pool of memory.

    Their memory is shared: a result must be used up, in stream order, before another graph runs.

    What cannot be captured is run by hand, in the same shapes, so that ranks whose graphs could be
    made still meet those whose could not in every collective. One failure is enough: nothing more
    of its kind is tried.

    Attributes:
        seconds: spent on capturing, so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[StepKey | PrefillKey, Captured | ByHand] = {}
        self._by_hand: set[type] = set()
        self._pool: object = None
        self.seconds = 0.0

    @property
    def count(self) -> int:
        """Graphs made."""
        return sum(isinstance(each, Captured) for each in self._made.values())

    def steps(self) -> list[StepKey]:
        """The speculative steps that graphs were made for."""
        return [key for key in self._made if isinstance(key, StepKey)]

    def find(self, key: StepKey | PrefillKey) -> Captured | ByHand | None:
        """The graph for ``key``, if there is one yet."""
        return self._made.get(key)

    def capture(self, key: StepKey | PrefillKey, run: Callable[[], Any]) -> Captured | ByHand:
        """Make the graph for ``key``.

        Args:
            run: tensor operations only; called twice, so that kernels are compiled and libraries
                set up before the capture. The first call has its effects.
        """
        if type(key) in self._by_hand:
            return self._made.setdefault(key, ByHand(run))
        began = time.perf_counter()
        with torch.inference_mode():
            warm_up(run, self._device)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            try:
                found = self._made[key] = Captured(*record(run, self._pool, self._device))
            except CaptureFailed as failed:
                return self._give_up(key, run, failed)
        took = time.perf_counter() - began
        self.seconds += took
        logger.info("captured %s: %.2f s", key, took)
        return found

    def _give_up(
        self, key: StepKey | PrefillKey, run: Callable[[], Any], failed: CaptureFailed
    ) -> ByHand:
        self._by_hand.add(type(key))
        if not self.count:
            self._pool = None  # a pool that no graph lives in cannot be used again
        kind = "prompts" if isinstance(key, PrefillKey) else "steps"
        logger.warning(
            "could not capture %s (%s): from now on %s without a graph launch their kernels one "
            "by one, which is slower and gives the same tokens",
            key,
            failed,
            kind,
        )
        by_hand = self._made[key] = ByHand(run)
        return by_hand


def bucket_of(batch: int, buckets: Iterable[int]) -> int | None:
    """The smallest bucket that holds ``batch`` requests, if one does."""
    return min((bucket for bucket in buckets if bucket >= batch), default=None)


def default_buckets(max_batch_size: int) -> tuple[int, ...]:
    """Batch sizes to make graphs for: close together where a row more is felt most.

    1, 2, 4, then every 4th to 16, every 8th to 64, every 32nd to 256, every 128th, and the largest
    itself.
    """
    sizes = [1, 2, 4, 8, 12, 16, *range(24, 65, 8), *range(96, 257, 32)]
    sizes += range(384, max_batch_size + 1, 128)
    return (*(size for size in sizes if size < max_batch_size), max_batch_size)


def prefill_shape(requests: int, rows: int, real: int, most: int) -> PrefillKey | None:
    """The graph that serves a prefill, or ``None`` to run it eagerly.

    Launching a prefill's kernels one by one takes the host ten milliseconds and more, whatever
    their size; a graph takes one launch, and pays with rows that are only padding. Requests are
    rounded up to a power of two, rows to that or one and a half times it.

    Args:
        requests, rows: of the padded prefill.
        real: rows that are not padding.
        most: rows of the largest graph, over all requests.
    """
    key = PrefillKey(1 << (requests - 1).bit_length(), _rounded(rows))
    total = key.requests * key.rows
    worth = max(_FREE_ROWS, 1.5 * real, real + _SPARED_ROWS)
    return key if total <= most and total <= worth else None


def _rounded(rows: int) -> int:
    half = max(16, 1 << (rows - 1).bit_length()) // 2
    return half * 3 // 2 if half >= 32 and rows <= half * 3 // 2 else 2 * half


# So few rows cost a GPU little more than none: it reads the weights either way.
_FREE_ROWS = 256
# So many more take a model of eight billion weights about as long as the host's launches do.
_SPARED_ROWS = 512
# Sizes that graphs are made for at start: requests, rows of one, rows over all.
_TOGETHER, _LONGEST, _ALL_ROWS = 8, 1024, 2048


def together(rows: Sequence[int], most: int) -> int:
    """How many of the prefills that wait to run at once, so that a start has made their graph.

    Args:
        rows: of each, the longest first.
        most: rows of the largest graph, over all requests; 0 without graphs.
    """
    if not most:
        return len(rows)
    room = min(most, _ALL_ROWS) // _rounded(rows[0])
    requests = min(len(rows), _TOGETHER, 1 << max(room, 1).bit_length() - 1)
    while requests > 1 and not prefill_shape(requests, rows[0], sum(rows[:requests]), most):
        requests -= 1
    return requests


def first_prefills(most: int, most_requests: int) -> list[PrefillKey]:
    """Prefills to make graphs for at start, smallest first: of one, two, four and eight requests,
    each up to 1024 rows, and up to 2048 over all.

    Args:
        most: rows over all requests.
        most_requests: that can be computed at once. Rounded up, they may be one graph's more.
    """
    found: dict[PrefillKey, None] = {}
    requests = 1
    while requests <= _TOGETHER and requests // 2 < most_requests:
        for rows in range(16, min(_LONGEST, _ALL_ROWS // requests) + 1, 16):
            key = prefill_shape(requests, rows, requests * rows, most)
            if key is not None:
                found[key] = None
        requests *= 2
    return sorted(found, key=lambda key: key.requests * key.rows)
