"""What the parent and its ranks say to each other: pickled records over one socket per rank.

Payloads (arguments, values) travel as bytes pickled once more inside the record, so that one that
cannot be read back is an error of its own call and never loses the record around it.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Start:
    """First message to a rank: who it is and what to build. Answered like request ``START``.

    Args:
        port: loopback port of the parent's key-value store, for the rendezvous.
        threads: torch threads of this rank.
        timeout: seconds a collective may take.
        factory: pickled ``(factory, keyword arguments)``.
    """

    rank: int
    size: int
    port: int
    backend: str
    threads: int
    timeout: float
    factory: bytes


@dataclass(frozen=True, slots=True)
class Request:
    """One method call, the same on every rank. Rank 0 sends its value, with ``gather`` all do."""

    number: int
    method: str
    arguments: bytes
    gather: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave after the requests sent before this one."""


@dataclass(frozen=True, slots=True)
class Returned:
    """A rank has finished a request; ``value`` is pickled."""

    number: int
    rank: int
    value: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """A request raised on a rank. ``error`` is the pickled exception if it is Knockon's own."""

    number: int
    rank: int
    summary: str
    traceback: str
    error: bytes | None


START = 0
"""Number under which ranks answer `Start`; requests count up from it."""

NOTHING = pickle.dumps(None)
