"""Who is told what a matrix is doing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from knockon.bench.matrix.cells import Cell


@dataclass(frozen=True)
class Progress:
    """Each may be left out.

    Attributes:
        cell: a cell is begun, of so many requests.
        doing: what is under way in it.
        ended: a request has ended.
        done: a line on a finished cell.
    """

    cell: Callable[[Cell, int], None] = lambda cell, requests: None
    doing: Callable[[str], None] = lambda text: None
    ended: Callable[[], None] = lambda: None
    done: Callable[[str], None] = lambda text: None
