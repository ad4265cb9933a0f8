"""Ranks as threads of one process: the collectives of a group, in lockstep."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Meeting:
    """Where the ranks of one group exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.offers: list[Tensor] = [torch.empty(0)] * size


class LockstepGroup:
    """One rank's view of the group."""

    def __init__(self, meeting: Meeting, size: int, rank: int) -> None:
        self.meeting = meeting
        self.size = size
        self.rank = rank

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self.meeting.offers[self.rank] = x.clone()
        self.meeting.barrier.wait()
        offers = list(self.meeting.offers)
        self.meeting.barrier.wait()
        return offers

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        torch.stack(self._exchange(x), out=out)

    def all_reduce(self, x: Tensor) -> None:
        total = torch.zeros_like(x)
        for offer in self._exchange(x):
            total += offer
        x.copy_(total)

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self._exchange(x)[0])


def run_ranks(size: int, program: Callable[[LockstepGroup], T]) -> list[T]:
    """Run ``program`` on ``size`` ranks and return their results in rank order."""
    meeting = Meeting(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = program(LockstepGroup(meeting, size, rank))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next(
            (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]
        )
    return [results[rank] for rank in range(size)]
