"""Running one program again and again: as a CUDA graph, or eagerly on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from knockon.bench.rollout.variants import Program

WARM_UPS = 3


class Graphed:
    """``program`` captured as a CUDA graph.

    Collectives are warmed up before the capture, and the capture tolerates what NCCL's watchdog
    thread does meanwhile.
    """

    def __init__(self, program: Program) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                program()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._program = program  # owns tensors that the graph reads
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._output = program()

    def __call__(self) -> Tensor:
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
