"""CUDA graphs of speculative steps: from draft to commit in one launch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from knockon.engine.sampling import DrawKind

logger = logging.getLogger(__name__)

Run = Callable[[Tensor, int, DrawKind], tuple[Tensor, Tensor]]
"""``(slots [n], width, kind) -> (packed [n, width + 1], logits)``, tensor operations only."""


class GraphKey(NamedTuple):
    """What a graph is made for."""

    bucket: int
    width: int
    kind: DrawKind


class CapturedStep:
    """A graph and where it leaves its result."""

    def __init__(self, graph: torch.cuda.CUDAGraph, packed: Tensor) -> None:
        self._graph = graph
        self._packed = packed

    def replay(self) -> Tensor:
        """Run the step; int64 ``[bucket, width + 1]``, overwritten by the next graph's replay."""
        self._graph.replay()
        return self._packed


class StepGraphs:
    """Makes graphs when they are first asked for and keeps them, in one pool of memory.

    Their memory is shared: a result must be copied, in stream order, before another graph runs.

    Attributes:
        seconds: spent on capturing, so far.
        count: graphs made.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[GraphKey, CapturedStep] = {}
        self._pool: object = None
        self.seconds = 0.0

    @property
    def count(self) -> int:
        """Graphs made."""
        return len(self._graphs)

    def items(self) -> Iterable[tuple[GraphKey, CapturedStep]]:
        """Every graph with what it was made for."""
        return self._graphs.items()

    def get(self, key: GraphKey, slots: Tensor, idle: int, run: Run) -> CapturedStep:
        """The graph for ``key``, captured now if it is not there yet.

        Args:
            slots: int64 ``[bucket]``, the buffer that the graph will read.
            idle: the slot on which the step can be run for nothing, before it is captured.
        """
        found = self._graphs.get(key)
        if found is None:
            began = time.perf_counter()
            found = self._graphs[key] = self._capture(key, slots, idle, run)
            took = time.perf_counter() - began
            self.seconds += took
            logger.info(
                "captured batch %d, verify width %d, %s: %.2f s",
                key.bucket,
                key.width,
                "greedy" if key.kind.all_greedy else key.kind,
                took,
            )
        return found

    def _capture(self, key: GraphKey, slots: Tensor, idle: int, run: Run) -> CapturedStep:
        with torch.inference_mode():
            held = slots.clone()
            slots.fill_(idle)
            # Once beforehand: kernels are compiled and libraries set up outside of the capture.
            stream = torch.cuda.Stream(self._device)
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                run(slots, key.width, key.kind)
            torch.cuda.current_stream(self._device).wait_stream(stream)
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self._pool):  # type: ignore[arg-type]
                packed, _ = run(slots, key.width, key.kind)
            slots.copy_(held)
        return CapturedStep(graph, packed)


def bucket_of(batch: int, buckets: Iterable[int]) -> int:
    """The smallest bucket that holds ``batch`` requests; the largest must."""
    return min(bucket for bucket in buckets if bucket >= batch)


def default_buckets(max_batch_size: int) -> tuple[int, ...]:
    """Batch sizes to make graphs for: close together where a row more is felt most.

    1, 2, 4, then every 4th to 16, every 8th to 64, every 32nd to 256, every 128th, and the largest
    itself.
    """
    sizes = [1, 2, 4, 8, 12, 16, *range(24, 65, 8), *range(96, 257, 32)]
    sizes += range(384, max_batch_size + 1, 128)
    return (*(size for size in sizes if size < max_batch_size), max_batch_size)
