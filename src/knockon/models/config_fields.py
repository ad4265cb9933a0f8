"""Single fields of a configuration, each held to what it may be."""

from __future__ import annotations

from typing import Any

from knockon.errors import Refused

# Sizes beyond these are damage, and would exhaust memory before a weight could be held to them.
MOST_VALUES = 1 << 24
MOST_LAYERS = 1 << 12


def read_size(
    config: dict[str, Any], name: str, default: int | None = None, most: int = MOST_VALUES
) -> int:
    """A whole number from 1 to ``most``.

    Raises:
        Refused: anything else, or nothing where there is no ``default``.
    """
    value = config.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise Refused(name, value, f"a whole number, 1 to {most}")
    return value


def read_flag(config: dict[str, Any], name: str) -> bool:
    """True or false; false where nothing is said.

    Raises:
        Refused: anything else.
    """
    value = config.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise Refused(name, value, "true or false")
    return value
