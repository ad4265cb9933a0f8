"""Workers that the tests of the launcher put on real ranks."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from knockon.errors import Refused


class Worker:
    """A worker with one method for each way a rank may behave."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup, label: str = "") -> None:
        self.rank, self.size, self.group, self.label = rank, size, group, label
        self.seen: list[int] = []

    def add(self, number: float) -> float:
        """Sum over the ranks of ``number + rank``."""
        x = torch.tensor([number + self.rank], dtype=torch.float64)
        dist.all_reduce(x, group=self.group)
        return x.item()

    def describe(self) -> tuple[int, int, str, int, int]:
        return self.rank, self.size, self.label, torch.get_num_threads(), os.getpid()

    def kept_objects(self) -> int:
        return gc.get_freeze_count()

    def environ(self, name: str) -> str | None:
        return os.environ.get(name)

    def note(self, number: int) -> None:
        self.seen.append(number)

    def noted(self) -> list[int]:
        return self.seen

    def raise_on(self, rank: int) -> None:
        if self.rank == rank:
            print("a last word from the rank", file=sys.stderr, flush=True)
            raise ValueError("this rank only")
        self.add(0)

    def refuse(self, value: object) -> None:
        raise Refused("max_tokens", value, "a positive number")

    def kill_in_collective(self, rank: int) -> None:
        if self.rank == rank:
            time.sleep(0.3)  # the others are blocked in their all_reduce by now
            os.kill(os.getpid(), signal.SIGKILL)
        self.add(0)

    def leave(self, rank: int) -> None:
        if self.rank == rank:
            os._exit(7)

    def hang(self, rank: int) -> int:
        if self.rank == rank:
            time.sleep(600)
        return self.rank

    def echo_late(self, value: object) -> object:
        time.sleep(0.5)
        return value

    def ignore_terminate_and_hang(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)

    def unpicklable(self) -> object:
        return lambda: None

    def echo(self, value: object) -> object:
        return value


def build(rank: int, size: int, group: dist.ProcessGroup, label: str = "") -> Worker:
    return Worker(rank, size, group, label)


def refuse_all(rank: int, size: int, group: dist.ProcessGroup) -> Worker:
    raise Refused("tp_size", size, "a divisor of 4", hint="Use 4")


def die_at_start(rank: int, size: int, group: dist.ProcessGroup) -> Worker:
    if rank == 1:
        print("no memory for the weights", file=sys.stderr, flush=True)
        os._exit(3)
    return Worker(rank, size, group)


def raise_at_start(rank: int, size: int, group: dist.ProcessGroup) -> Worker:
    worker = Worker(rank, size, group)
    if rank == 1:
        raise OSError("cannot read the weights")
    worker.add(0)
    return worker
