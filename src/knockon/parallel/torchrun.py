"""The ranks that ``torchrun`` started: whether there are any, and joining them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from knockon.errors import KnockonError, Refused

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# How long ranks wait for each other: to join, and in a collective.
_WAIT = timedelta(seconds=120)


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


def _environment_number(name: str, least: int) -> int:
    text = os.environ[name]
    if not text.isdecimal() or int(text) < least:
        raise Refused(name, text, f"a number of at least {least}")
    return int(text)


def is_first_rank() -> bool:
    """Whether this process is the one that prints and writes."""
    return torchrun_size() is None or int(os.environ["RANK"]) == 0


def local_ranks() -> int:
    """Ranks of ``torchrun`` on this host; 1 outside of it."""
    size = torchrun_size()
    return 1 if size is None else int(os.environ.get("LOCAL_WORLD_SIZE", size))


@contextlib.contextmanager
def joined(backend: str, wait: timedelta = _WAIT) -> Iterator[torch.device]:
    """Membership of ``torchrun``'s ranks, on the device of this one.

    Args:
        wait: how long ranks wait for each other, to join and in a collective.

    Raises:
        KnockonError: the ranks did not find each other.
    """
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    chosen = device if backend == "nccl" else None
    try:
        dist.init_process_group(backend, device_id=chosen, timeout=wait)
    except (dist.DistError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise KnockonError(f"the ranks of torchrun did not find each other: {reason}") from error
    try:
        yield device
        dist.barrier()  # none takes the group apart while another still talks
    finally:
        dist.destroy_process_group()


def leave() -> NoReturn:
    """End this rank, its work done and the group left, without taking torch apart.

    That has been seen to abort a process (``terminate called without an active exception``), and
    ``torchrun`` then calls the whole run failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
