"""What a report is made of, before it is Markdown or HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    """A section's title; level 1 is the report's."""

    level: int
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph; a loud one is set off from the rest."""

    text: str
    loud: bool = False


@dataclass(frozen=True)
class Entry:
    """A table's entry; ``aside`` stands in brackets, or below where lines are short."""

    text: str
    bold: bool = False
    aside: str = ""


@dataclass(frozen=True)
class Table:
    """The first column names the rows; the others are numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Entry]]


@dataclass(frozen=True)
class Points:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Lines to be typed."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Picture:
    """A PNG beside the report, by its file's name."""

    file: str
    text: str


Block = Heading | Text | Table | Points | Code | Picture
