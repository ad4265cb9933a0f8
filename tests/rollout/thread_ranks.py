"""Ranks as threads: a group whose collectives meet in memory and are counted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class ThreadGroup:
    """One rank's view of a group of threads.

    Attributes:
        calls: how often each collective was entered on this rank.
    """

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._slots = barrier, slots
        self.calls: Counter[str] = Counter()

    def _exchange(self, name: str, x: Tensor) -> list[Tensor]:
        self.calls[name] += 1
        self._slots[self.rank] = (name, x.clone())
        self._barrier.wait()
        everyone = list(self._slots)
        self._barrier.wait()
        assert len({(kind, tuple(y.shape), y.dtype) for kind, y in everyone}) == 1
        return [y for _, y in everyone]

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        assert tuple(out.shape) == (self.size, *x.shape)
        out.copy_(torch.stack(self._exchange("all_gather", x)))

    def all_reduce(self, x: Tensor) -> None:
        parts = self._exchange("all_reduce", x)
        x.copy_(sum(parts[1:], parts[0]))

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self._exchange("broadcast", x)[0])


def run_ranks(size: int, program: Callable[[ThreadGroup], Result]) -> list[Result]:
    """Run ``program`` on every rank; one that fails frees the others, and its error is raised."""
    barrier = threading.Barrier(size, timeout=60)
    slots: list = [None] * size

    def run(rank: int) -> Result | BaseException:
        try:
            return program(ThreadGroup(rank, size, barrier, slots))
        except Exception as error:
            barrier.abort()
            return error

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(run, range(size)))
    errors = [r for r in results if isinstance(r, BaseException)]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    if errors:
        raise errors[0]
    return results
