"""Methods by name: the target alone, or a drafter at a verify width."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from knockon.errors import Refused

TARGET, AUTO = "target", "auto"
# As the published tables order and write them.
KINDS = {TARGET: "target-only", "mtp": "MTP", "dflash": "DFlash", "domino": "Domino"}
_NAME = re.compile(r"target|mtp(-s([1-9]\d*)|-auto)?|(dflash|domino)(-b([1-9]\d*)|-auto)?")
_WANTED = "target, or mtp, dflash or domino, alone or with -sN (MTP's steps), -bN or -auto"


@dataclass(frozen=True)
class ServedMethod:
    """One column of the tables.

    Attributes:
        name: as asked for, ``"domino-b8"``.
        kind: ``"target"``, ``"mtp"``, ``"dflash"`` or ``"domino"``.
        width: positions verified at a time; ``"auto"`` where the server chooses step by step;
            ``None`` for its default.
    """

    name: str
    kind: str
    width: int | str | None

    @property
    def title(self) -> str:
        """As the published tables write it."""
        known = KINDS[self.kind]
        if self.kind == TARGET or self.width is None:
            return known
        if self.width == AUTO:
            return f"{known} auto"
        assert isinstance(self.width, int)
        return f"{known}-S{self.width - 1}" if self.kind == "mtp" else f"{known} b{self.width}"

    def serve_arguments(self, draft: str | None) -> list[str]:
        """What ``knockon serve`` is told of it.

        Args:
            draft: the drafter's path; ``None`` for the target's own MTP head, and for none.
        """
        found = []
        if draft is not None and self.kind != TARGET:
            found += ["--speculative-draft-model-path", draft]
        if self.kind == "mtp":
            found += ["--speculative-algorithm", "MTP"]
            if isinstance(self.width, int):
                found += ["--speculative-num-steps", str(self.width - 1)]
        elif isinstance(self.width, int) and self.kind != TARGET:
            found += ["--speculative-num-draft-tokens", str(self.width)]
        if self.width == AUTO:
            found += ["--verify-width", AUTO]
        return found


def parse_method(name: str) -> ServedMethod:
    """Read a name.

    Raises:
        Refused: not one of a method.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise Refused("methods", name, _WANTED)
    kind = name.partition("-")[0]
    if kind == TARGET:
        return ServedMethod(name, kind, 1)
    if name.endswith("-auto"):
        return ServedMethod(name, kind, AUTO)
    if match[2] is not None:
        return ServedMethod(name, kind, int(match[2]) + 1)
    width = None if match[5] is None else int(match[5])
    if width == 1:
        raise Refused("methods", name, "a verify width of 2 or more; 1 is the target alone")
    return ServedMethod(name, kind, width)


def parse_methods(names: Sequence[str]) -> tuple[ServedMethod, ...]:
    """Read several; their order is that of the tables' columns.

    Raises:
        Refused: a name that is none, or the same twice.
    """
    found = tuple(parse_method(name) for name in names)
    for name in names:
        if list(names).count(name) > 1:
            raise Refused("methods", name, "each method once")
    return found
