"""A row of the benchmark: a method at a verify width."""

from __future__ import annotations

from dataclasses import dataclass

TARGET = "target"


@dataclass(frozen=True)
class Variant:
    """What one engine is made for.

    Attributes:
        width: positions verified at a time, or ``"auto"``; 1 for the target alone.
    """

    method: str
    width: int | str

    @property
    def label(self) -> str:
        """``"target"``, ``"domino w8"``, ``"domino auto"``."""
        if self.method == TARGET:
            return self.method
        return (
            f"{self.method} w{self.width}"
            if isinstance(self.width, int)
            else (f"{self.method} {self.width}")
        )

    @property
    def fixed(self) -> bool:
        """Whether all steps verify alike."""
        return isinstance(self.width, int)
