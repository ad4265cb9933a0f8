"""What an engine step is to do, as the scheduler tells the runner."""

from __future__ import annotations

from dataclasses import dataclass, field

from knockon.engine.request import Request


@dataclass(frozen=True)
class PrefillChunk:
    """Positions ``[start, start + count)`` of a request, to be run in this step.

    Attributes:
        kept_slot: where the state of recurrent layers is to be left aside on the way; -1 for
            nowhere.
        kept_rows: after how many rows.
    """

    request: Request
    start: int
    count: int
    kept_slot: int = -1
    kept_rows: int = 0

    @property
    def last(self) -> bool:
        """Whether the prefix is complete after this chunk."""
        return self.start + self.count == self.request.prefill_end

    @property
    def revisits(self) -> bool:
        """Whether its keys and values lie in shared pages, and only states go through its rows."""
        return self.start < self.request.kept


@dataclass(frozen=True)
class Step:
    """What the engine does next: the prefill chunks first, then one decode step for the batch.

    Attributes:
        restored: requests admitted in this step that go on from a checkpoint, and its slot; to be
            copied to theirs before anything runs.
    """

    prefill: list[PrefillChunk]
    decode: list[Request]
    restored: list[tuple[int, Request]] = field(default_factory=list)
