"""Held-out prompts must not be trained on: found by the same words, or by most of their runs."""

from __future__ import annotations

import re
from collections.abc import Iterable

_RUN = 8  # words; long enough that stock phrases of a task are no match by themselves
_SHARE = 0.5


class HeldOutPrompts:
    """Tells prompts that are, or nearly are, among the held-out ones.

    Args:
        texts: the held-out prompts.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._whole: set[tuple[str, ...]] = set()
        self._runs: set[tuple[str, ...]] = set()
        for text in texts:
            words = _words(text)
            self._whole.add(words)
            self._runs.update(_runs(words))

    def overlaps(self, text: str) -> bool:
        """Whether it has a held-out prompt's words, or half of its runs of 8 words from them."""
        words = _words(text)
        if words in self._whole:
            return True
        runs = _runs(words)
        return bool(runs) and sum(run in self._runs for run in runs) >= _SHARE * len(runs)


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text.lower()))


def _runs(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [words[i : i + _RUN] for i in range(len(words) - _RUN + 1)]
