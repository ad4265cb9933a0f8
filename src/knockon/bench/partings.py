"""Where two answers to the same prompt part."""

from __future__ import annotations

from collections.abc import Sequence


def first_partings(
    ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """``(answer, at)`` of every answer that is not the same, and its first token that is not.

    ``at`` is the shorter one's length where one only goes on longer.
    """
    found = []
    for answer, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if list(a) != list(b):
            pairs = enumerate(zip(a, b, strict=False))
            shorter = min(len(a), len(b))
            found.append((answer, next((i for i, (x, y) in pairs if x != y), shorter)))
    return found
