"""One rank as the parent holds it: its process, its socket and the end of its stderr."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe

STDERR_KEPT = 8192  # bytes of a rank's stderr that an error can show


class RankHandle:
    """Starts the process of rank ``number`` and holds its operating-system side.

    The process leads a process group of its own, so that a terminal's Ctrl-C does not reach it and
    its own children end with it. It inherits stdout; stderr is passed on and its end is kept.
    """

    def __init__(self, number: int, environment: Mapping[str, str]) -> None:
        self.number = number
        self.connection: Connection
        self.connection, theirs = Pipe(duplex=True)
        try:
            # -P: the parent's import path arrives whole in PYTHONPATH; the working folder, which
            # -m would put before it, may hold files named like modules.
            command = [sys.executable, "-P", "-m", "knockon.parallel.rank_process"]
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=[theirs.fileno()],
                process_group=0,
                env=environment,
            )
        except BaseException:
            self.connection.close()
            raise
        finally:
            theirs.close()
        assert self.process.stderr is not None
        self.stderr_fd = self.process.stderr.fileno()
        self.stderr_open = True
        os.set_blocking(self.stderr_fd, False)
        self._tail = bytearray()

    def forward_stderr(self) -> None:
        """Pass on what the rank has written so far; never waits."""
        while self.stderr_open:
            try:
                chunk = os.read(self.stderr_fd, 65536)
            except BlockingIOError:
                return
            self.stderr_open = bool(chunk)
            self._tail += chunk
            del self._tail[:-STDERR_KEPT]
            with contextlib.suppress(OSError):
                os.write(2, chunk)

    def last_stderr(self) -> str:
        self.forward_stderr()
        return self._tail.decode(errors="replace")

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the rank and its children, unless the rank has ended already."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Give back the descriptors, once the process has ended."""
        self.forward_stderr()
        self.connection.close()
        assert self.process.stderr is not None
        self.process.stderr.close()
