"""What the HTTP process and the engine process say to each other, as MessagePack over one socket.

Every sequence has a number, given by the HTTP process. Messages of one direction arrive in order.
"""

from __future__ import annotations

from typing import Any

import msgspec

from knockon.engine.occupancy import Capacity
from knockon.engine.sampling_params import SamplingParams


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base: tagged by its class's name, written as an array."""


# To the engine


class Load(Message):
    """The first message: what to load. Fields of ``EngineConfig``."""

    config: dict[str, Any]
    log_level: str


class Add(Message):
    """Queue a sequence."""

    number: int
    prompt: list[int]
    params: SamplingParams


class Abort(Message):
    """End sequences now; those that have ended are passed over."""

    numbers: list[int]


class AskStats(Message):
    """Answered by :class:`Stats` with the same ticket."""

    ticket: int


class AskFlush(Message):
    """Forget cached prompts; answered by :class:`Flushed` with the same ticket."""

    ticket: int


class Stop(Message):
    """Close the engine and leave."""


ToEngine = Load | Add | Abort | AskStats | AskFlush | Stop


# From the engine


class Ready(Message):
    """Loaded: what it holds, the settings in force, the machine and the model's sizes."""

    capacity: Capacity
    config: dict[str, Any]
    environment: dict[str, Any]
    sizes: dict[str, Any]


class TokenInfo(msgspec.Struct, array_like=True):
    """Log-probabilities at one position: the token's own, and the most probable, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class End(msgspec.Struct, array_like=True):
    """How a sequence ended; see :class:`~knockon.engine.request.RequestOutput`."""

    reason: str
    stop_reason: str | int | None
    accept_lengths: list[int]
    cached_tokens: int
    queued: float
    preemptions: int


class Delta(msgspec.Struct, array_like=True):
    """What one step gave one sequence."""

    number: int
    text: str
    tokens: list[int]
    logprobs: list[TokenInfo] | None
    end: End | None


class Outputs(Message):
    """What one step gave, and how long it took."""

    deltas: list[Delta]
    seconds: float


class Rejected(Message):
    """A sequence that the engine will not run."""

    number: int
    field: str
    text: str


class Stats(Message):
    """``occupancy`` and ``metrics`` are ``Occupancy`` and ``EngineMetrics`` as plain data."""

    ticket: int
    occupancy: dict[str, Any]
    metrics: dict[str, Any]


class Flushed(Message):
    """How many pages were dropped."""

    ticket: int
    pages: int


class Alive(Message):
    """Sent about every second while there is nothing to do."""


class Failed(Message):
    """The engine's last words. ``refused``: what was asked for cannot be had, no fault here."""

    text: str
    refused: bool


FromEngine = Ready | Outputs | Rejected | Stats | Flushed | Alive | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
