"""The parent's thread that starts the ranks, hears them, and ends them all when one fails."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from knockon.errors import KnockonError, RankFailed
from knockon.parallel.rank_failure import (
    Death,
    agreed_error,
    first_cause,
    rank_failed,
    ranks_silent,
)
from knockon.parallel.rank_handle import RankHandle
from knockon.parallel.rank_messages import START, Raised, Request, Returned, Start, Stop

POLL = 0.5  # s; a death is normally noticed at once by its socket, a held socket by this
SETTLE = 0.5  # s from a first exception to the verdict: a peer's death may be its cause
SETTLE_REFUSAL = 5.0  # s for the other ranks to come to the same refusal
STOP_GRACE = 3.0  # s an idle rank may take to leave when asked to
TERMINATE_GRACE = 1.0  # s from SIGTERM to SIGKILL


@dataclass(slots=True)
class _Pending:
    what: str
    timeout: float | None
    noted: bool  # someone waits for the outcome (a call, not a cast)
    future: Future[list[bytes]] = field(default_factory=Future)
    returned: dict[int, bytes] = field(default_factory=dict)
    raised: list[Raised] = field(default_factory=list)
    sent_at: float = field(default_factory=time.monotonic)
    raised_at: float = 0.0

    def waiting(self, size: int) -> list[int]:
        answered = self.returned.keys() | {report.rank for report in self.raised}
        return [rank for rank in range(size) if rank not in answered]

    def doing(self) -> str:
        return f"in {self.what}"


class RankSupervisor:
    """Owns the ranks' processes, from their start to their end.

    All of it happens on one thread made for it, which ends after the last rank: the kernel ties a
    rank's life to the thread that started it (`die_with_parent`), and whichever thread of the
    user's made the pool may be gone long before.
    """

    def __init__(
        self, starts: Sequence[Start], environment: Mapping[str, str], store: object
    ) -> None:
        self._thread = threading.Thread(target=self._run, name="knockon-ranks", daemon=True)
        self.size = len(starts)
        self.failure: RankFailed | None = None
        self.ended = False
        self.ranks: list[RankHandle] = []
        self.owner_pid = os.getpid()
        self._starts = starts
        self._environment = environment
        self._store = store
        self._closing = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._order = threading.Lock()  # held while one request goes to every rank
        self._state = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._deaths: list[Death] = []
        self._last_number = START
        self._started = _Pending("its start", timeout=starts[0].timeout, noted=True)
        self._pending[START] = self._started

    # Called from any thread

    def launch(self) -> list[bytes]:
        """Start the thread and the ranks; the ranks' answers once all workers are built."""
        self._thread.start()
        return self._started.future.result()

    def submit(
        self, method: str, arguments: bytes, *, gather: bool, noted: bool, timeout: float | None
    ) -> Future[list[bytes]]:
        """Send one request to every rank; the future holds each rank's pickled value."""
        with self._order:
            with self._state:
                if self.failure is not None:
                    raise RankFailed(*self.failure.args)
                if self.ended or self._closing:
                    raise RankFailed("the ranks have been closed")
                self._last_number += 1
                pending = _Pending(repr(method), timeout, noted)
                self._pending[self._last_number] = pending
            message = pickle.dumps(Request(self._last_number, method, arguments, gather))
            try:
                self._send(message)
            except BaseException:  # interrupted half-way: the ranks are no longer in step
                self._closing = True
                self._wake()
                raise
        if timeout is not None:
            self._wake()
        return pending.future

    def close(self) -> None:
        """End the ranks and wait until they are gone. Safe at any time, on any thread, again."""
        if os.getpid() != self.owner_pid:  # a fork of the parent owns nothing
            return
        self._closing = True
        self._wake()
        # Garbage collection may run this on the supervisor itself, which then ends by the flag.
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join()

    # On the thread that owns the ranks

    def _run(self) -> None:
        try:
            for start in self._starts:
                self.ranks.append(RankHandle(start.rank, self._environment))
            for rank, start in zip(self.ranks, self._starts, strict=True):
                with contextlib.suppress(OSError):  # died already: noticed as a death
                    rank.connection.send_bytes(pickle.dumps(start))
            while not self._closing and self.failure is None:
                self._hear()
                self._judge()
        except Exception as error:
            self.failure = RankFailed(f"the ranks cannot be run: {error}")
        finally:
            self._end()

    def _send(self, message: bytes) -> None:
        for rank in self.ranks:
            with contextlib.suppress(OSError):  # died already: noticed as a death
                rank.connection.send_bytes(message)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: awake anyway; closed: ended
            self._wake_out.send(b".")

    def _hear(self) -> None:
        connections = {rank.connection: rank for rank in self.ranks}
        errors = {rank.stderr_fd: rank for rank in self.ranks if rank.stderr_open}
        for ready in wait([*connections, *errors, self._wake_in], self._patience()):
            if isinstance(ready, int):
                errors[ready].forward_stderr()
            elif ready is self._wake_in:
                with contextlib.suppress(BlockingIOError):
                    self._wake_in.recv(4096)
            else:
                self._receive(connections[ready])  # type: ignore[index]
        seen = {death.rank for death in self._deaths}
        for rank in self.ranks:
            status = rank.process.poll()
            if status is not None and rank.number not in seen:
                self._deaths.append(Death(rank.number, status))

    def _receive(self, rank: RankHandle) -> None:
        try:
            reply = pickle.loads(rank.connection.recv_bytes())
        except (EOFError, OSError):
            # The process follows its socket within moments. If it does not, it can serve no more.
            with contextlib.suppress(Exception):
                rank.process.wait(timeout=TERMINATE_GRACE)
            rank.signal_group(signal.SIGKILL)
            rank.process.wait()
            return
        with self._state:
            pending = self._pending[reply.number]
            if isinstance(reply, Returned):
                pending.returned[rank.number] = reply.value
            else:
                pending.raised.append(reply)
                pending.raised_at = pending.raised_at or time.monotonic()
            done = not pending.raised and not pending.waiting(self.size)
            if done:
                del self._pending[reply.number]
        if done:
            pending.future.set_result([pending.returned[rank] for rank in range(self.size)])

    def _patience(self) -> float:
        """Seconds until something is due even if no rank says anything."""
        now = time.monotonic()
        with self._state:
            due = [p.sent_at + p.timeout - now for p in self._pending.values() if p.timeout]
            soon = any(p.raised for p in self._pending.values())
        return max(0.0, min([POLL / 5 if soon else POLL, *due]))

    def _judge(self) -> None:
        now = time.monotonic()
        with self._state:
            pendings = dict(self._pending)
        raised = [report for pending in pendings.values() for report in pending.raised]
        if self._deaths:
            cause = first_cause(self._deaths, raised)
            own = [p for p in pendings.values() if cause.rank in p.waiting(self.size)]
            self._fail(cause, own[0].doing() if own else "between calls")
            return
        for number, pending in pendings.items():
            waiting = pending.waiting(self.size)
            if pending.raised:
                agreed = agreed_error(pending.raised, self.size) if pending.noted else None
                if agreed is not None:
                    self._reject(number, pickle.loads(agreed))
                    continue
                refusal = all(report.error for report in pending.raised)
                settle = SETTLE_REFUSAL if refusal else SETTLE
                if not waiting or now >= pending.raised_at + settle:
                    self._fail(first_cause([], pending.raised), pending.doing())
                    return
            elif pending.timeout is not None and now >= pending.sent_at + pending.timeout:
                self.failure = ranks_silent(waiting, self.size, pending.what, pending.timeout)
                return

    def _fail(self, cause: Death | Raised, doing: str) -> None:
        stderr = self.ranks[cause.rank].last_stderr()
        self.failure = rank_failed(cause, self.size, doing, stderr)

    def _reject(self, number: int, error: KnockonError) -> None:
        with self._state:
            pending = self._pending.pop(number)
        pending.future.set_exception(error)

    def _end(self) -> None:
        """End every rank, then tell whoever waits: after the error there is no process left."""
        with self._state:
            idle = self.failure is None and not self._pending
            self.ended = True
        if idle:
            self._send(pickle.dumps(Stop()))
            self._wait_for_deaths(STOP_GRACE)
        for rank in self.ranks:
            rank.signal_group(signal.SIGTERM)
        self._wait_for_deaths(TERMINATE_GRACE)
        for rank in self.ranks:
            rank.signal_group(signal.SIGKILL)
            rank.process.wait()
        with self._order:  # a sender may still hold a connection; its peer is dead, so not for long
            for rank in self.ranks:
                rank.close()
            self._wake_in.close()
            self._wake_out.close()
        self._store = None  # closes the rendezvous port
        with self._state:
            left = list(self._pending.values())
            self._pending.clear()
        for pending in left:
            error = self.failure or RankFailed(f"the ranks were closed {pending.doing()}")
            pending.future.set_exception(RankFailed(*error.args))

    def _wait_for_deaths(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while any(rank.process.poll() is None for rank in self.ranks):
            if time.monotonic() >= until:
                return
            for rank in self.ranks:
                rank.forward_stderr()  # a rank that cannot write cannot leave
            time.sleep(0.01)
