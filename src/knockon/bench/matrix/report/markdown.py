"""Blocks as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from knockon.bench.matrix.report.blocks import (
    Block,
    Code,
    Entry,
    Heading,
    Picture,
    Points,
    Table,
    Text,
)

# What would be taken for markup inside a line.
_MARKUP = str.maketrans({each: "\\" + each for each in "\\`*_|<>[]"})


def to_markdown(blocks: Sequence[Block]) -> str:
    """The whole report."""
    return "\n\n".join(_block(block) for block in blocks) + "\n"


def _block(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {_plain(text)}"
        case Text(text, loud):
            return f"> **{_plain(text)}**" if loud else _plain(text)
        case Points(items):
            return "\n".join(f"- {_plain(item)}" for item in items)
        case Code(lines):
            return "\n".join(f"    {line}" for line in lines)
        case Picture(file, text):
            return f"![{_plain(text)}]({file})"
        case Table():
            return _table(block)


def _table(table: Table) -> str:
    head = [_plain(column) for column in table.columns]
    rule = ["---"] + ["---:"] * (len(head) - 1)
    rows = [[_entry(entry) for entry in row] for row in table.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows])


def _entry(entry: Entry) -> str:
    text = _plain(entry.text) + (f" ({_plain(entry.aside)})" if entry.aside else "")
    return f"**{text}**" if entry.bold else text


def _plain(text: str) -> str:
    return " ".join(text.translate(_MARKUP).split())
