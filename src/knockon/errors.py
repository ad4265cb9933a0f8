"""Errors that every room may raise; this module lies under all of them and imports nothing."""

from __future__ import annotations


class KnockonError(Exception):
    """Base of every error that Knockon raises on purpose. The command line exits with 2 on it."""


class Refused(KnockonError, ValueError):
    """Something asked for cannot be done, found out at an edge (configuration, weights, request).

    The message names the field, the value found and what is accepted.

    Args:
        field: dotted name of what is wrong, e.g. ``"dflash_config.block_size"``.
        found: the offending value.
        wanted: what would have been accepted, as a phrase.
        hint: one more sentence for the reader, optional.
    """

    def __init__(self, field: str, found: object, wanted: str, hint: str = "") -> None:
        self.field = field
        self.found = found
        self.wanted = wanted
        self.hint = hint
        text = f"{field}: found {found!r}, wanted {wanted}"
        super().__init__(f"{text}. {hint}" if hint else text)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.field, self.found, self.wanted, self.hint))


class RankFailed(KnockonError, RuntimeError):
    """A rank of a tensor-parallel run died or stopped answering; the message names it."""
