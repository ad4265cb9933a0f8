"""Blocks as one HTML page that needs nothing else: style and pictures are in it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

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

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; background: #fff;
       max-width: 76rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
h3 { font-size: 1rem; margin-bottom: .3rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; line-height: 1.35;
        font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .55rem; text-align: right; white-space: nowrap;
         border-bottom: 1px solid #dde3e9; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 2px solid #9aa5b1; }
img { max-width: 100%; height: auto; }
.loud { border-left: 4px solid #c2410c; background: #fff4ed; padding: .6rem .9rem;
        font-weight: 600; }
pre { background: #f3f5f7; padding: .7rem .9rem; overflow-x: auto; font-size: 13px; }
""".strip()
# Should anything ever slip in that asks for more, browsers will not fetch it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def to_html(blocks: Sequence[Block], folder: Path) -> str:
    """The whole report.

    Args:
        folder: where the pictures lie.
    """
    title = next(block.text for block in blocks if isinstance(block, Heading))
    body = "\n".join(_block(block, folder) for block in blocks)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _block(block: Block, folder: Path) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Text(text, loud):
            kind = "loud" if loud else "text"
            return f'<p class="{kind}">{escape(text)}</p>'
        case Points(items):
            return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"
        case Code(lines):
            return f"<pre>{escape(chr(10).join(lines))}</pre>"
        case Picture(file, text):
            data = base64.b64encode((folder / file).read_bytes()).decode()
            return f'<p><img alt="{escape(text)}" src="data:image/png;base64,{data}"></p>'
        case Table():
            return _table(block)


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "\n".join(
        f"<tr>{''.join(f'<td>{_entry(entry)}</td>' for entry in row)}</tr>" for row in table.rows
    )
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table></div>"
    )


def _entry(entry: Entry) -> str:
    text = escape(entry.text) + (f"<br>{escape(entry.aside)}" if entry.aside else "")
    return f"<b>{text}</b>" if entry.bold else text
