"""A server process: started, waited for, and ended with everything that it started."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType

from knockon.errors import KnockonError

ENDS_BY_ITSELF, ENDS_AT_ONCE = 30.0, 5.0  # s after the first SIGTERM, and after the second
POLL = 0.05  # s; an answer takes the server about a millisecond
_TAIL = 40
_LISTENING = re.compile(r"knockon\.server: listening: (http://\S+)$", re.MULTILINE)
_CAPTURED = re.compile(r"graphs: captured .*: (\d+\.\d+) s$", re.MULTILINE)


class ServerFailed(KnockonError, RuntimeError):
    """A server did not get ready, or died."""


@dataclass(frozen=True)
class StartTimes:
    """Where a start went, in seconds.

    Attributes:
        listening: from the process's creation until it answers ``/health``.
        ready: until it serves requests.
        graphs: CUDA graphs captured within, and ``capture`` the seconds of that.
    """

    listening: float
    ready: float
    graphs: int
    capture: float


class ServerProcess:
    """``knockon serve`` on a free port of this host, in a session of its own.

    Args:
        arguments: of ``knockon serve``, besides host and port.
        log: file for its output.

    Attributes:
        url: where it listens; empty until :meth:`look` has seen that.
    """

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        # The server takes the port itself: one that was free here might be another's by then.
        self.url = ""
        self.command = ["serve", "--host", "127.0.0.1", "--port", "0", *arguments]
        self._log = log
        self._began = time.perf_counter()
        self._listening: float | None = None
        self._asked = False
        with log.open("wb") as out:
            # Its session holds the engine and its ranks too. A terminal's Ctrl-C is the matrix's.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "knockon.bench.matrix.leash", *self.command],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                start_new_session=True,
            )

    def wait_ready(self, limit: float) -> StartTimes:
        """Until it serves.

        Raises:
            ServerFailed: it ended before, or is not ready after ``limit`` seconds.
        """
        while (start := self.look(limit)) is None:
            time.sleep(POLL)
        return start

    def look(self, limit: float) -> StartTimes | None:
        """How it started, once it serves; ``None`` before.

        Raises:
            ServerFailed: it has ended, or is not ready after ``limit`` seconds.
        """
        status = self.process.poll()
        if status is not None:
            raise ServerFailed(f"the server ended with exit code {status} while starting")
        if not self.url and (found := _LISTENING.search(self.log)):
            self.url = found[1]
        if self.url:
            answer = self._ready_status()
            if answer is not None:
                waited = time.perf_counter() - self._began
                self._listening = self._listening or waited
                if answer == 200:
                    captured = capture_times(self.log)
                    return StartTimes(self._listening, waited, len(captured), sum(captured))
        if time.perf_counter() - self._began >= limit:
            raise ServerFailed(f"the server was not ready after {limit:g} s")
        return None

    def _ready_status(self) -> int | None:
        """What ``/health/ready`` answers, if anything does."""
        connection = HTTPConnection(self.url.removeprefix("http://"), timeout=10)
        with contextlib.closing(connection), contextlib.suppress(OSError, HTTPException):
            connection.request("GET", "/health/ready")
            return connection.getresponse().status
        return None

    @property
    def log(self) -> str:
        """What it wrote so far."""
        return self._log.read_text("utf-8", errors="replace")

    def last_lines(self) -> list[str]:
        """The end of its log."""
        return self.log.splitlines()[-_TAIL:]

    def ask_to_end(self) -> None:
        """Tell it to end, once, and do not wait for that."""
        if not self._asked and self.process.poll() is None:
            self._asked = True
            self.process.terminate()

    def ended_soon(self) -> int | None:
        """Its exit code, where it ends within a second: its connections break before it is gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(1.0)
        return None

    def stop(self) -> int:
        """End it: asked first, then told, then killed with whatever is left of its session.

        Returns:
            Its exit code; 0 after an orderly end.
        """
        try:
            self.ask_to_end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(ENDS_BY_ITSELF)
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(ENDS_AT_ONCE)
        finally:
            self._kill_session()
        return self.process.wait()

    def _kill_session(self) -> None:
        assert self.process.stdin is not None
        if self.process.stdin.closed:  # done before; its number may be another's by now
            return
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for left in session_members(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        until = time.monotonic() + ENDS_AT_ONCE
        # A GPU's memory comes back with their end, and the next server wants it.
        while session_members(self.process.pid) and time.monotonic() < until:
            time.sleep(0.01)
        self.process.stdin.close()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self._kill_session()  # interrupted: nobody waits for an orderly end
        elif self.process.stdin is not None and not self.process.stdin.closed:
            self.stop()


def capture_times(log: str) -> list[float]:
    """Seconds of each capture of a CUDA graph that a log tells of."""
    return [float(found) for found in _CAPTURED.findall(log)]


def session_members(session: int) -> list[int]:
    """Processes of a session that have not ended, on systems that tell by ``/proc``."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            of = (path / "stat").read_text().rpartition(")")[2].split()
            if int(of[3]) == session and of[0] not in "ZX":
                found.append(int(path.name))
    return found
