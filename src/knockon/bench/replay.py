"""Running one program again and again, and how long it takes: as a CUDA graph, or eagerly."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

WARM_UPS = 3
ROUNDS = 5

Result = TypeVar("Result")


class Graphed(Generic[Result]):
    """``program`` captured as a CUDA graph.

    Collectives are warmed up before the capture, and the capture tolerates what NCCL's watchdog
    thread does meanwhile.

    Args:
        tidy: collect garbage and free cached memory first, as ``torch.cuda.graph`` does; that takes
            longer than a capture where there are hundreds.
    """

    def __init__(self, program: Callable[[], Result], tidy: bool = True) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                program()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._program = program  # owns tensors that the graph reads
        self._graph = torch.cuda.CUDAGraph()
        if tidy:
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._output = program()
        else:
            with torch.cuda.stream(side):
                self._graph.capture_begin(capture_error_mode="thread_local")
                self._output = program()
                self._graph.capture_end()
            torch.cuda.synchronize()

    def __call__(self) -> Result:
        """Replay; the output is overwritten by the next one."""
        self._graph.replay()
        return self._output


def collective_kernels(run: Callable[[], object], device: torch.device) -> int:
    """How many of NCCL's kernels one call launches, as the profiler sees them."""
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize(device)
    return sum("nccl" in event.name.lower() for event in trace.events() or ())


def mean_ms(run: Callable[[], object], replays: int, device: torch.device) -> float:
    """Mean milliseconds of ``run`` over ``replays`` calls in a row, after one that is not timed."""
    run()
    if device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(replays):
            run()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / replays
    started = time.perf_counter()
    for _ in range(replays):
        run()
    return (time.perf_counter() - started) * 1e3 / replays


def median_us(
    run: Callable[[], object],
    device: torch.device,
    replays: int | None = None,
    rounds: int = ROUNDS,
    seconds: float = 0.05,
) -> float:
    """Median over ``rounds`` of :func:`mean_ms`, in microseconds.

    Args:
        replays: of a round; ``None`` for as many as take ``seconds``, at least 3.
    """
    if replays is None:
        replays = max(3, int(seconds * 1000 / mean_ms(run, 3, device)))
    return statistics.median(mean_ms(run, replays, device) for _ in range(rounds)) * 1000


def replay_us(
    calls: Sequence[Callable[[], Any]], replays: int | None = None, seconds: float = 0.05
) -> float:
    """Microseconds of one of ``calls``, captured one after another as one graph.

    Several calls keep a kernel of a few microseconds from being hidden behind the graph's launch,
    or walk through more memory than a cache holds.
    """
    graphed = Graphed(lambda: [call() for call in calls])
    return median_us(graphed, torch.device("cuda"), replays, seconds=seconds) / len(calls)
