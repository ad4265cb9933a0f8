"""``python -m knockon.bench.matrix.leash ARGUMENTS``: the ``knockon`` command on a leash.

Standard input is a pipe that only the matrix holds the other end of. It closes when the matrix is
gone, killed included, and then the command is ended too: no server is left behind on a GPU.
"""

from __future__ import annotations

import os
import runpy
import signal
import threading
import time

GRACE = 10.0  # s for a server to end by itself


def _follow() -> None:
    while os.read(0, 1024):
        pass
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        os.kill(os.getpid(), number)
        time.sleep(GRACE / 2)


if __name__ == "__main__":
    threading.Thread(target=_follow, daemon=True).start()
    runpy.run_module("knockon", run_name="__main__", alter_sys=True)
