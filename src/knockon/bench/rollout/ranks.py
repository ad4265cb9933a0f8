"""Where the ranks come from: this process, processes started here, or those of ``torchrun``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from knockon.bench.rollout.rank import RolloutRank, lone_rank, spawned_rank
from knockon.bench.rollout.settings import RolloutSettings
from knockon.errors import KnockonError, Refused
from knockon.parallel import TorchGroup
from knockon.parallel.launch import RankPool


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


def torchrun_size() -> int | None:
    """Ranks that ``torchrun`` started, ``None`` outside of it.

    Raises:
        Refused: only a part of ``torchrun``'s variables, or values that it never sets.
    """
    found = [name for name in _TORCHRUN if name in os.environ]
    if "RANK" not in found and "WORLD_SIZE" not in found:
        return None
    missing = [name for name in _TORCHRUN if name not in found]
    if missing:
        raise Refused("torchrun's environment", ", ".join(found), f"{', '.join(missing)} too")
    size = _environment_number("WORLD_SIZE", 1)
    rank = _environment_number("RANK", 0)
    if rank >= size:
        raise Refused("RANK", rank, f"less than WORLD_SIZE = {size}")
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        if name in os.environ:
            _environment_number(name, 0)
    return size


_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# How long ranks wait for each other: to join, and in a collective.
_WAIT = timedelta(seconds=120)


def _environment_number(name: str, least: int) -> int:
    text = os.environ[name]
    if not text.isdecimal() or int(text) < least:
        raise Refused(name, text, f"a number of at least {least}")
    return int(text)


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


def is_first_rank() -> bool:
    """Whether this process is the one that prints and writes."""
    return torchrun_size() is None or int(os.environ["RANK"]) == 0


def check_devices(settings: RolloutSettings) -> None:
    """Hold the ranks of this host against its GPUs.

    Raises:
        Refused: fewer GPUs than ranks.
    """
    here = settings.tp_size
    if torchrun_size() is not None:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", here))
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
        with _joined(backend) as device:
            group = TorchGroup()
            yield TorchrunRanks(RolloutRank(settings, group, device), group.size)
    elif settings.tp_size == 1:
        yield LoneRank(lone_rank(settings))
    else:
        arguments = {"settings": settings}
        with RankPool(settings.tp_size, spawned_rank, arguments, backend=backend) as pool:
            yield pool


@contextlib.contextmanager
def _joined(backend: str) -> Iterator[torch.device]:
    """Membership of ``torchrun``'s ranks, on the device of this one."""
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    chosen = device if backend == "nccl" else None
    try:
        dist.init_process_group(backend, device_id=chosen, timeout=_WAIT)
    except (dist.DistError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise KnockonError(f"the ranks of torchrun did not find each other: {reason}") from error
    try:
        yield device
    finally:
        dist.destroy_process_group()
