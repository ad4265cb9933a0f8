"""Prompts to be answered: JSON lines, or a column of a data set on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from knockon.errors import Refused
from knockon.train.chat_format import read_prompts

HUB = "hub:"
# Where publishers put what a user says, in the order in which a column is looked for.
COLUMNS = ("turns", "messages", "conversations", "prompt", "instruction", "question", "text")


def load_prompts(source: str) -> list[str]:
    """First turns.

    Args:
        source: a file of ``{"turns": [...]}`` a line, or ``hub:org/dataset[:split[:column]]``; the
            split is ``train`` by default, the column the first of `COLUMNS` that is there.

    Raises:
        Refused: a file that cannot be read, a data set that is not to be had, no such column, a
            value in it that is no text.
    """
    if source.startswith(HUB):
        return _from_hub(source)
    try:
        return read_prompts(Path(source))
    except OSError as error:
        raise Refused("prompts", source, "a readable file", str(error.strerror)) from None


def _from_hub(source: str) -> list[str]:
    name, _, rest = source.removeprefix(HUB).partition(":")
    split, _, column = rest.partition(":")
    try:
        from datasets import load_dataset
    except ImportError:
        hint = "pip install datasets"
        raise Refused("prompts", source, "a file, or the package datasets", hint) from None
    try:
        rows = load_dataset(name, split=split or "train")
    except Exception as error:  # whatever its many loaders raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Refused("prompts", source, "a data set of the hub", reason) from error
    names = list(rows.column_names)
    found = column or next((each for each in COLUMNS if each in names), None)
    if found is None or found not in names:
        raise Refused("prompts", source, f"a column, one of {', '.join(names)}")
    return [_first_turn(value, source, found) for value in rows[found]]


def _first_turn(value: Any, source: str, column: str) -> str:
    """Of a text, of turns, or of messages with roles."""
    if isinstance(value, list) and value:
        users = [
            turn
            for turn in value
            if not isinstance(turn, dict) or turn.get("role", turn.get("from")) in ("user", "human")
        ]
        value = users[0] if users else None
    if isinstance(value, dict):
        value = value.get("content", value.get("value"))
    if not isinstance(value, str):
        raise Refused(f"prompts {source}: {column}", value, "a text, turns or messages")
    return value
