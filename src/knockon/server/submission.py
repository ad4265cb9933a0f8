"""The sequences of one HTTP request, from the engine client to whoever renders the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

from knockon.server.api_error import ApiError
from knockon.server.messages import Delta


class Submission:
    """Collects what the engine gives for ``numbers``, one sequence each.

    Args:
        numbers: of the sequences; their places are the indices of the answer's choices.
        arrival: ``time.perf_counter()`` when the request came in.
        leave: called once with the numbers still running when the submission is closed.
    """

    def __init__(
        self, numbers: Sequence[int], arrival: float, leave: Callable[[list[int]], None]
    ) -> None:
        self._index = {number: index for index, number in enumerate(numbers)}
        self._arrived: asyncio.Queue[Delta | ApiError] = asyncio.Queue()
        self._leave = leave
        self._closed = False
        self.arrival = arrival
        self.first_token = dict.fromkeys(numbers, 0.0)
        self.num_tokens = dict.fromkeys(numbers, 0)

    def deliver(self, delta: Delta) -> None:
        """Take what a step gave one of the sequences."""
        if delta.tokens:
            self.num_tokens[delta.number] += len(delta.tokens)
            self.first_token[delta.number] = self.first_token[delta.number] or time.perf_counter()
        self._arrived.put_nowait(delta)

    def fail(self, error: ApiError) -> None:
        """Nothing more will come; whoever reads gets ``error``."""
        self._arrived.put_nowait(error)

    async def batches(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        """All that has come since the last look, with the choice's index, until every one ended.

        A reader slower than the engine finds several steps at once.

        Raises:
            ApiError: a sequence was refused, or the engine has failed.
        """
        left = len(self._index)
        while left:
            found = [await self._arrived.get()]
            while not self._arrived.empty():
                found.append(self._arrived.get_nowait())
            batch: list[tuple[int, Delta]] = []
            for each in found:
                if isinstance(each, ApiError):
                    if batch:
                        yield batch
                    raise each
                left -= each.end is not None
                batch.append((self._index[each.number], each))
            yield batch

    def close(self) -> None:
        """Give up what still runs; may be called twice."""
        if not self._closed:
            self._closed = True
            self._leave(list(self._index))
