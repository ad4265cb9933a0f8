"""What a command line gives as text: lists with commas between."""

from __future__ import annotations

from knockon.bench.engine.settings import ACCEPT_LENGTHS
from knockon.engine.width import AUTO
from knockon.errors import Refused


def parse_accept_lengths(text: str) -> dict[str, float]:
    """``"dflash=6.878,domino=9.16"`` to numbers by method.

    Raises:
        Refused: anything else.
    """
    wanted = f"METHOD=MEAN with commas between, of {', '.join(ACCEPT_LENGTHS)}"
    found: dict[str, float] = {}
    for part in text.split(","):
        method, separator, value = (piece.strip() for piece in part.partition("="))
        if not separator or method not in ACCEPT_LENGTHS or method in found:
            raise Refused("accept_length", part, wanted)
        try:
            found[method] = float(value)
        except ValueError:
            raise Refused("accept_length", part, wanted) from None
    return found


def parse_narrow_accept_lengths(text: str) -> dict[str, tuple[int, float]]:
    """``"domino@8=6.335"`` to a width and a mean by method.

    Raises:
        Refused: anything else.
    """
    found: dict[str, tuple[int, float]] = {}
    for part in text.split(","):
        key, _, mean = (piece.strip() for piece in part.partition("="))
        method, _, width = key.partition("@")
        try:
            if method not in ACCEPT_LENGTHS or method in found:
                raise ValueError
            found[method] = (int(width), float(mean))
        except ValueError:
            methods = ", ".join(ACCEPT_LENGTHS)
            wanted = f"METHOD@WIDTH=MEAN, one a method, with commas between, of {methods}"
            raise Refused("narrow_accept_length", part, wanted) from None
    return found


def parse_verify_widths(text: str) -> tuple[int | str, ...]:
    """``"8,16,auto"`` to widths.

    Raises:
        Refused: anything else.
    """
    parts = [part.strip() for part in text.split(",")]
    try:
        return tuple(AUTO if part == AUTO else int(part) for part in parts)
    except ValueError:
        wanted = f"numbers or {AUTO} with commas between, e.g. 8,16,{AUTO}"
        raise Refused("verify_width", text, wanted) from None


def parse_alternate(text: str) -> tuple[int, int]:
    """``"1,32"`` to two numbers.

    Raises:
        Refused: anything else.
    """
    parts = text.split(",")
    try:
        low, high = (int(part) for part in parts)
    except ValueError:
        raise Refused("alternate", text, "LOW,HIGH, e.g. 1,32") from None
    return low, high
