"""Several ranks on this host, each a process of its own, called by the parent as if one."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import socket
import sys
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from knockon.errors import RankFailed, Refused
from knockon.parallel.pending_call import PendingCall
from knockon.parallel.rank_messages import Start
from knockon.parallel.rank_supervisor import RankSupervisor

BACKENDS = ("gloo", "nccl")


class RankPool:
    """Starts ``size`` ranks, builds one worker on each, and sends them all the same calls.

    Every rank is a fresh Python process (``python -m``, so the caller's ``__main__`` is not run
    again and needs no guard) with the parent's environment and import path. The ranks meet over a
    loopback port and form the default ``torch.distributed`` group. The worker is
    ``factory(rank, size, process_group, **kwargs)``; its methods may use collectives, since every
    rank gets the same requests in the same order, whichever threads they come from.

    When a rank raises, dies or stays silent beyond a timeout, all ranks are ended and the call,
    and every later one, raises `RankFailed` naming that rank. When *all* ranks raise the same
    `KnockonError` (a refusal) it is raised here as it is and the ranks live on. The ranks end with
    `close`, the ``with`` block, garbage collection, the interpreter, or the parent's violent death.

    Args:
        size: number of ranks, at least 1; with ``nccl`` at most the number of CUDA devices.
        factory: ``"module:function"``, or a callable that ranks can import.
        kwargs: picklable keyword arguments for the factory.
        backend: ``"gloo"`` (CPU) or ``"nccl"`` (rank ``r`` on CUDA device ``r``).
        threads_per_rank: torch threads of each rank; by default the parent's are dealt out.
        timeout: seconds for the ranks to start and build their workers, and for any collective.

    Raises:
        Refused: an argument cannot be used, or every rank refused to build its worker.
        RankFailed: a rank raised, died or did not get ready in time.
    """

    def __init__(
        self,
        size: int,
        factory: str | Callable[..., object],
        kwargs: Mapping[str, object] | None = None,
        *,
        backend: str = "gloo",
        threads_per_rank: int | None = None,
        timeout: float = 600.0,
    ) -> None:
        threads = _threads(size, threads_per_rank)
        _check(size, factory, backend, timeout)
        pickled = pickle.dumps((factory, dict(kwargs or {})))
        store, port = _loopback_store()
        starts = [
            Start(rank, size, port, backend, threads, timeout, pickled) for rank in range(size)
        ]
        self._supervisor = RankSupervisor(starts, _environment(threads), store)
        del store  # the supervisor's alone, so that the port closes with the ranks
        self._finalizer = weakref.finalize(self, self._supervisor.close)
        try:
            devices = [pickle.loads(name) for name in self._supervisor.launch()]
            if len(set(devices)) > 1:
                raise Refused("devices", devices, "the same kind of device for every rank")
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._supervisor.size

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, by rank."""
        return tuple(rank.process.pid for rank in self._supervisor.ranks)

    @property
    def failure(self) -> RankFailed | None:
        """What ended the ranks, known between calls too; None while all is well."""
        return self._supervisor.failure

    def call(self, method: str, *args: object, timeout: float | None = None) -> Any:
        """Run ``worker.method(*args)`` on every rank; rank 0's result, once all have finished.

        An interrupt (Ctrl-C) ends the waiting, not the ranks: they finish the call, and what is
        sent next follows it. Who wants the result all the same takes :meth:`start`.

        Args:
            timeout: seconds after which the ranks that have not answered are named and all ended.

        Raises:
            RankFailed: a rank raised, died or took too long, now or before; or the pool is closed.
            KnockonError: the one that every rank raised alike; the pool can still be used.
        """
        return self.start(method, *args, timeout=timeout).result()

    def start(self, method: str, *args: object, timeout: float | None = None) -> PendingCall:
        """Like `call`, without waiting: the result can be asked for later."""
        return PendingCall(self._submit(method, args, gather=False, timeout=timeout))

    def call_all(self, method: str, *args: object, timeout: float | None = None) -> list[Any]:
        """Like `call`, with every rank's result, by rank."""
        values = self._submit(method, args, gather=True, timeout=timeout).result()
        return [pickle.loads(value) for value in values]

    def cast(self, method: str, *args: object) -> None:
        """Like `call`, without waiting. Any error ends the ranks and is raised by the next call."""
        arguments = pickle.dumps(args)
        self._supervisor.submit(method, arguments, gather=False, noted=False, timeout=None)

    def close(self) -> None:
        """End the ranks: asked first when idle, then terminated, then killed; within seconds."""
        self._supervisor.close()
        self._finalizer.detach()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _submit(
        self, method: str, args: tuple[object, ...], *, gather: bool, timeout: float | None
    ) -> Future[list[bytes]]:
        return self._supervisor.submit(
            method, pickle.dumps(args), gather=gather, noted=True, timeout=timeout
        )


def _check(size: int, factory: str | Callable[..., object], backend: str, timeout: float) -> None:
    if not hasattr(os, "killpg") or not sys.executable:
        raise Refused("platform", sys.platform, "a POSIX system with a Python executable")
    if backend not in BACKENDS or not dist.is_backend_available(backend):
        known = " or ".join(name for name in BACKENDS if dist.is_backend_available(name))
        raise Refused("backend", backend, f"one that this torch has: {known}")
    if backend == "nccl" and size > torch.cuda.device_count():
        raise Refused("size", size, f"at most {torch.cuda.device_count()}, the CUDA devices here")
    if not timeout > 0:
        raise Refused("timeout", timeout, "more than 0 seconds")
    if isinstance(factory, str):
        module, _, path = factory.partition(":")
        if not module or not path:
            raise Refused("factory", factory, "'module:function'")
        return
    inner: Any = factory
    while isinstance(inner, functools.partial):
        inner = inner.func
    if getattr(inner, "__module__", None) == "__main__":
        name = getattr(inner, "__qualname__", inner)
        raise Refused("factory", name, "a function in a module that can be imported, not __main__")


def _threads(size: int, threads_per_rank: int | None) -> int:
    if size < 1:
        raise Refused("size", size, "at least 1")
    if threads_per_rank is not None and threads_per_rank < 1:
        raise Refused("threads_per_rank", threads_per_rank, "at least 1")
    return threads_per_rank or max(1, torch.get_num_threads() // size)


def _loopback_store() -> tuple[TCPStore, int]:
    """A store that listens on a free loopback port, held from the moment it is chosen."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        port: int = listener.getsockname()[1]
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, port


def _environment(threads: int) -> dict[str, str]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment["OMP_NUM_THREADS"] = str(threads)  # before torch is imported: pools start small
    with contextlib.suppress(OSError):
        # Gloo would otherwise use the address of the host's name, which a firewall may guard.
        loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback[0] if loopback else "")
        if not environment["GLOO_SOCKET_IFNAME"]:
            del environment["GLOO_SOCKET_IFNAME"]
    return environment
