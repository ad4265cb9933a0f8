"""Whose output is whose, where several callers advance one engine."""

from __future__ import annotations

from collections.abc import Iterable

from knockon.engine.engine import StepOutput


class Mailboxes:
    """Keeps each request's outputs for the caller who waits for them.

    A step advances every request, so whoever takes it also receives what belongs to others. A
    request with a box of its own (``generate`` and ``stream`` open one) has its outputs put there;
    all others (queued with ``add``) share one, which ``LLM.step`` empties.
    """

    def __init__(self) -> None:
        self._boxes: dict[str, list[StepOutput]] = {}
        self._shared: list[StepOutput] = []

    def open(self, request_id: str) -> None:
        """Give a request a box of its own."""
        self._boxes[request_id] = []

    def close(self, request_id: str) -> None:
        """Drop a request's box and what is in it."""
        self._boxes.pop(request_id, None)

    def deliver(self, outputs: Iterable[StepOutput]) -> None:
        """Put each output into the box of its request, or the shared one."""
        for output in outputs:
            self._boxes.get(output.request_id, self._shared).append(output)

    def owned(self, request_id: str) -> bool:
        """Whether a request has a box of its own."""
        return request_id in self._boxes

    def take(self, request_id: str) -> list[StepOutput]:
        """Empty a request's box."""
        found, self._boxes[request_id] = self._boxes[request_id], []
        return found

    def take_shared(self) -> list[StepOutput]:
        """Empty the box of the requests that have none of their own."""
        found, self._shared = self._shared, []
        return found
