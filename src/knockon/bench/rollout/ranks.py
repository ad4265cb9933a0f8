"""Where the ranks come from: this process, processes started here, or those of ``torchrun``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from knockon.bench.rollout.rank import RolloutRank, lone_rank, spawned_rank
from knockon.bench.rollout.settings import RolloutSettings
from knockon.errors import Refused
from knockon.parallel import TorchGroup
from knockon.parallel.launch import RankPool
from knockon.parallel.torchrun import joined, local_ranks, torchrun_size


class Ranks(Protocol):
    """Ranks that are all sent the same calls."""

    def call_all(self, method: str, *args: object) -> list[Any]:
        """``worker.method(*args)`` on every rank; results by rank."""
        ...


class LoneRank:
    """The worker in this process."""

    def __init__(self, worker: RolloutRank) -> None:
        self.worker = worker

    def call_all(self, method: str, *args: object) -> list[Any]:
        return [getattr(self.worker, method)(*args)]


class TorchrunRanks:
    """This process's worker and its peers, each of which runs this same program."""

    def __init__(self, worker: RolloutRank, size: int) -> None:
        self.worker = worker
        self.size = size

    def call_all(self, method: str, *args: object) -> list[Any]:
        results: list[Any] = [None] * self.size
        dist.all_gather_object(results, getattr(self.worker, method)(*args))
        return results


def decide_tp_size(asked: int | None, one_rank_of: int | None) -> int:
    """Ranks of the run: ``torchrun``'s, or those asked for.

    Raises:
        Refused: a number that contradicts ``torchrun``.
    """
    size = torchrun_size()
    if size is None:
        return 1 if asked is None else asked
    if asked not in (None, size):
        raise Refused("tp_size", asked, f"nothing, or torchrun's WORLD_SIZE = {size}")
    if one_rank_of is not None and size > 1:
        raise Refused("one_rank_of", one_rank_of, f"nothing under torchrun with {size} ranks")
    return size


def check_devices(settings: RolloutSettings) -> None:
    """Hold the ranks of this host against its GPUs.

    Raises:
        Refused: fewer GPUs than ranks.
    """
    here = settings.tp_size if torchrun_size() is None else local_ranks()
    if settings.device == "cuda" and here > torch.cuda.device_count():
        raise Refused("tp_size", here, f"at most {torch.cuda.device_count()}, the GPUs here")


@contextlib.contextmanager
def ranks_for(settings: RolloutSettings) -> Iterator[Ranks]:
    """Start or join the ranks of a run, and leave them afterwards.

    Raises:
        Refused: fewer GPUs than ranks.
        RankFailed: a rank that was started died.
    """
    check_devices(settings)
    backend = "nccl" if settings.device == "cuda" else "gloo"
    if torchrun_size() not in (None, 1):
        with joined(backend) as device:
            group = TorchGroup()
            yield TorchrunRanks(RolloutRank(settings, group, device), group.size)
    elif settings.tp_size == 1:
        yield LoneRank(lone_rank(settings))
    else:
        arguments = {"settings": settings}
        with RankPool(settings.tp_size, spawned_rank, arguments, backend=backend) as pool:
            yield pool
