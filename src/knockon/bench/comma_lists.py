"""Lists that a command line gives as text with commas between."""

from __future__ import annotations

from knockon.errors import Refused


def parse_numbers(field: str, text: str) -> tuple[int, ...]:
    """``"1,8,32"`` to numbers.

    Args:
        field: what a refusal names.

    Raises:
        Refused: anything else.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise Refused(field, text, "numbers with commas between, e.g. 1,8,32") from None


def parse_names(text: str) -> tuple[str, ...]:
    """``"target,domino"`` to its parts."""
    return tuple(part.strip() for part in text.split(","))
