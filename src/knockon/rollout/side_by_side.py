"""Parts of a batch whose chains run beside each other on one GPU.

A chain is a row of small kernels, each waiting for the one before, which leave most of the GPU
idle. The requests of a large batch do not meet in it, so parts of the batch each take a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from knockon.parallel import deal

MAX_PARTS = 4


def batch_parts(batch: int, is_cuda: bool, *, smallest: int = 16) -> list[slice]:
    """How a batch is cut: into at most :data:`MAX_PARTS`, of ``smallest`` requests or more.

    A pure choice by size, the same in a CUDA graph and outside, so that both compute the same sums.
    """
    parts = min(MAX_PARTS, max(1, batch // smallest)) if is_cuda else 1
    dealt = (deal(batch, parts, part) for part in range(parts))
    return [slice(start, start + count) for start, count in dealt]


def run_beside(works: Sequence[Callable[[], None]], streams: Sequence[torch.cuda.Stream]) -> None:
    """Run each of ``works`` on a stream of its own, the last on the current one, which then waits.

    Also while a CUDA graph is captured: the streams become branches of it. What ``works`` write
    must have been allocated before, and what they allocate must not outlive them.
    """
    beside = streams[: len(works) - 1]
    current = torch.cuda.current_stream(streams[0].device)
    for stream in beside:
        stream.wait_stream(current)
    for work, stream in zip(works, beside, strict=False):
        with torch.cuda.stream(stream):
            work()
    works[-1]()
    for stream in beside:
        current.wait_stream(stream)
