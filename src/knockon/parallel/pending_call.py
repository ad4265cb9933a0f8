"""A call that every rank has been sent, and whose result can be waited for more than once."""

from __future__ import annotations

import pickle
from concurrent.futures import Future
from typing import Any


class PendingCall:
    """Rank 0's result, once all ranks have finished.

    Args:
        future: of each rank's pickled value.
    """

    def __init__(self, future: Future[list[bytes]]) -> None:
        self._future = future
        self._value: list[Any] = []

    def result(self) -> Any:
        """Wait for it. After an interrupt (Ctrl-C) it can be waited for again.

        Raises:
            RankFailed: a rank raised, died or took too long; or the pool was closed.
            KnockonError: the one that every rank raised alike.
        """
        if not self._value:
            self._value = [pickle.loads(self._future.result()[0])]
        return self._value[0]
