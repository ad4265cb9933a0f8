"""The process of one rank: ``python -m knockon.parallel.rank_process SOCKET_FD PARENT_PID``.

Run by `knockon.parallel.launch`, not by hand. The main thread builds the worker and runs requests
in the order they were sent; a second thread reads the socket all the time, so that the parent's
death is noticed while the main thread is blocked in a collective.
"""

from __future__ import annotations

import atexit
import ctypes
import datetime
import faulthandler
import importlib
import operator
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from knockon.errors import KnockonError
from knockon.parallel.rank_messages import NOTHING, START, Raised, Request, Returned, Start, Stop
from knockon.startup_heap import keep_startup_objects

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(socket_fd: int, parent_pid: int) -> None:
    """Serve the parent at the other end of ``socket_fd`` until it says stop or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt ends
    die_with_parent(parent_pid)
    faulthandler.enable()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # a rank may be killed with its buffer full
    connection: Connection = Connection(socket_fd)
    inbox: SimpleQueue[object] = SimpleQueue()
    reader = threading.Thread(target=_read, args=(connection, inbox), daemon=True)
    reader.start()
    start = inbox.get()
    assert isinstance(start, Start)
    _serve(start, connection, inbox)
    # What the interpreter does at its end, without its taking torch apart, which lasts a second.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process with its parent (Linux); leave if that is dead already.

    The kernel's signal needs no interpreter lock and no open socket. The signal follows the
    *thread* that started this process, which the parent therefore keeps alive.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _read(connection: Connection, inbox: SimpleQueue[object]) -> None:
    while True:
        try:
            message = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            leave_at_once()
        inbox.put(message)


def leave_at_once() -> None:
    """End this process and its own children, without waiting for the main thread."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _serve(start: Start, connection: Connection, inbox: SimpleQueue[object]) -> None:
    def answer(number: int, run: Callable[[], bytes]) -> None:
        reply: Returned | Raised
        try:
            reply = Returned(number, start.rank, run())
        except BaseException as error:  # SystemExit too: a worker must not end its rank quietly
            reply = _raised(number, start.rank, error)
        connection.send_bytes(pickle.dumps(reply))

    worker: object = None

    def build() -> bytes:
        nonlocal worker
        worker, device = _build(start)
        keep_startup_objects()
        return pickle.dumps(device)

    answer(START, build)
    while not isinstance(message := inbox.get(), Stop):
        assert isinstance(message, Request)
        sends_value = message.gather or start.rank == 0
        answer(message.number, lambda m=message, s=sends_value: _run(worker, m, s))  # type: ignore[misc]
    if dist.is_initialized():
        dist.destroy_process_group()


def _build(start: Start) -> tuple[object, str]:
    """Join the group and make the worker. Returns it and the name of the device it runs on."""
    torch.set_num_threads(start.threads)
    device = None
    name = "cpu"
    if start.backend == "nccl":
        device = torch.device("cuda", start.rank)
        torch.cuda.set_device(device)
        name = torch.cuda.get_device_name(device)
    timeout = datetime.timedelta(seconds=start.timeout)
    store = TCPStore("127.0.0.1", start.port, is_master=False, timeout=timeout)
    dist.init_process_group(
        # Words that hosts agree on (what to do next) go from host to host and wait for no GPU.
        "cpu:gloo,cuda:nccl" if start.backend == "nccl" else start.backend,
        store=store,
        rank=start.rank,
        world_size=start.size,
        timeout=timeout,
        device_id=device,
    )
    factory, kwargs = pickle.loads(start.factory)
    if isinstance(factory, str):
        module, _, path = factory.partition(":")
        factory = operator.attrgetter(path)(importlib.import_module(module))
    return factory(start.rank, start.size, dist.group.WORLD, **kwargs), name


def _run(worker: object, request: Request, sends_value: bool) -> bytes:
    value = getattr(worker, request.method)(*pickle.loads(request.arguments))
    return pickle.dumps(value) if sends_value else NOTHING


def _raised(number: int, rank: int, error: BaseException) -> Raised:
    text = "".join(traceback.format_exception(error))
    summary = "".join(traceback.format_exception_only(error)).strip()
    pickled = None
    if isinstance(error, KnockonError):
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:  # an error that holds what cannot be pickled still travels as text
            pickled = None
    return Raised(number, rank, summary, text, pickled)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
