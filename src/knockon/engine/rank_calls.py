"""Calls to the ranks whose results are taken in, in order, even if a caller is interrupted."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

from knockon.parallel.launch import RankPool
from knockon.parallel.pending_call import PendingCall


class RankCalls:
    """Remembers what the ranks have been sent until its result has been taken in.

    Ranks finish a call whose caller is interrupted (Ctrl-C); what they gave must not be lost.

    Args:
        pool: the ranks. Only one thread at a time may call.
    """

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool
        self._owed: deque[tuple[PendingCall, Callable[[Any], None]]] = deque()  # oldest first

    def call(self, method: str, *args: object, then: Callable[[Any], None]) -> Any:
        """Rank 0's result of ``worker.method(*args)`` on every rank, once all have finished.

        Args:
            then: what is done with the result, now or, after an interrupt, before the next call.
        """
        self._collect()
        call = self._pool.start(method, *args)
        self._owed.append((call, then))
        self._collect()
        return call.result()

    def _collect(self) -> None:
        while self._owed:
            call, then = self._owed[0]
            values = []
            # An error is its caller's, who asks again, or has been interrupted and is gone.
            with contextlib.suppress(Exception):
                values.append(call.result())
            # Else a signal's handler, which also called the engine, has taken it in meanwhile.
            if self._owed and self._owed[0][0] is call:
                self._owed.popleft()
                for value in values:
                    then(value)
