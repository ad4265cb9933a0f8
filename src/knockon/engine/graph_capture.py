"""Recording a CUDA graph, so that one that cannot be recorded costs nothing but itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch


class CaptureFailed(Exception):
    """A graph could not be recorded; the message is the first thing that went wrong."""


def warm_up(run: Callable[[], Any], device: torch.device) -> None:
    """Run once beside the current stream, as captures do, and wait for it."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)


def record(
    run: Callable[[], Any], pool: Any, device: torch.device
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of what ``run`` launches, and what it returns, which lies in ``pool``.

    Args:
        run: tensor operations only, whose kernels are compiled and libraries set up.
        pool: as ``torch.cuda.graph_pool_handle`` gives it.

    Raises:
        CaptureFailed: the device's streams, allocator and generator are as before, and nothing
            of the graph was run.
    """
    stream = torch.cuda.current_stream(device)
    graph = torch.cuda.CUDAGraph()
    reason = ""
    try:
        with torch.cuda.graph(
            graph,
            pool=pool,
            capture_error_mode="thread_local",  # NCCL's watchdog asks its events meanwhile
        ):
            try:
                result = run()
            except Exception as error:  # leaving a capture that this broke raises another
                reason = _in_a_line(error)
                raise
        return graph, result
    except Exception as error:
        reason = reason or _in_a_line(error)
    # Raised from here, since the exception above holds every frame, and so tensors of the pool.
    del graph
    _clean_up(stream, pool, device)
    raise CaptureFailed(reason)


def _in_a_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _clean_up(stream: torch.cuda.Stream, pool: Any, device: torch.device) -> None:
    """Undo what ``torch.cuda.graph`` has begun and does not end where ending the capture raises.

    Then it stays on its own stream, the allocator goes on believing that a capture is under way
    (and recycles no memory that two streams used), and so does the generator. Where ending it did
    not raise, each of these has been done, and asking again is refused.
    """
    torch.cuda.set_stream(stream)
    index = stream.device_index if device.index is None else device.index
    with suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    with suppress(RuntimeError, AttributeError):
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())
    torch.cuda.synchronize(device)
