"""Whose output is whose, where several callers advance one engine."""

from __future__ import annotations

from collections.abc import Iterable

from knockon.engine.engine import StepOutput


class Mailboxes:
    """Keeps each request's outputs for the caller who waits for them.

    A step advances every request, so whoever takes it also receives what belongs to others. A
    call of ``generate`` or ``stream`` has a box of its own for its requests; all others (queued
    with ``add``) share one, which ``LLM.step`` empties.
    """

    def __init__(self) -> None:
        self._boxes: dict[str, list[StepOutput]] = {}  # by request
        self._shared: list[StepOutput] = []

    def open(self, request_id: str, box: list[StepOutput]) -> None:
        """Put a request's outputs into ``box`` from now on."""
        self._boxes[request_id] = box

    def close(self, request_id: str) -> None:
        """Keep nothing more for the call that a request belongs to."""
        self._boxes.pop(request_id, None)

    def deliver(self, outputs: Iterable[StepOutput]) -> None:
        """Put each output into the box that its request belongs to, or the shared one."""
        for output in outputs:
            self._boxes.get(output.request_id, self._shared).append(output)

    def owned(self, request_id: str) -> bool:
        """Whether a request belongs to a call."""
        return request_id in self._boxes

    def take_shared(self) -> list[StepOutput]:
        """Empty the box of the requests that belong to no call."""
        return take(self._shared)


def take(box: list[StepOutput]) -> list[StepOutput]:
    """Empty a box."""
    found = box.copy()
    box.clear()
    return found
