"""A request from admission to its result, as the scheduler and the engine see it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from knockon.engine.sampling_params import SamplingParams


class Phase(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one output position, from the target's raw logits.

    Attributes:
        rank: 1 + the number of tokens more probable than this one.
        top: the most probable tokens and their log-probabilities, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


@dataclass(eq=False)
class Request:
    """One sequence being served.

    Attributes:
        bad_words: the token sequences of ``params.bad_words``.
        stream: whether every step's gain is told, or the end alone.
        tokens: prompt and output. The last one may be the bonus token, whose KV is not written.
        length: verified tokens whose target and draft KV are written, from position 0.
        pages: the KV pages held, in order of position.
        registered: how many of them have been offered to the prefix cache.
        kept: positions whose target and draft KV lies in shared pages; prefill goes through those
            past ``length`` for states alone, and writes nothing there.
        boundaries: positions after which the state of recurrent layers is kept, ascending.
        slot: its place in the device's state while it runs, else -1.
        stay: names one stay in a slot: a preempted request may come back to the slot it had.
        most_tokens: prompt and output that it may reach, by its own cap and by the context.
        flights: launched forwards whose tokens for it the host has not seen yet.
        ahead: by how many tokens, at most, those may make it longer.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    stream: bool = True
    arrival: float = field(default_factory=time.perf_counter)
    phase: Phase = Phase.WAITING
    tokens: list[int] = field(default_factory=list)
    length: int = 0
    pages: list[int] = field(default_factory=list)
    registered: int = 0
    kept: int = 0
    boundaries: tuple[int, ...] = ()
    slot: int = -1
    stay: int = 0
    most_tokens: int = 0
    flights: int = 0
    ahead: int = 0
    accept_lengths: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0
    preemptions: int = 0
    first_token_time: float | None = None
    start_time: float | None = None

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[len(self.prompt) :]

    @property
    def num_output(self) -> int:
        """How many tokens it has generated so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def is_new(self) -> bool:
        """Whether no token of it has been generated yet."""
        return self.num_output == 0

    @property
    def prefill_end(self) -> int:
        """Positions to prefill: the prompt, or, once a bonus token is known, all before it."""
        return len(self.tokens) - (len(self.tokens) > len(self.prompt))


@dataclass(frozen=True)
class RequestMetrics:
    """What a request cost; times in seconds since it was added.

    Attributes:
        accept_lengths: tokens kept per verification, bonus included, at most the verify width.
        cached_tokens: prompt tokens found in the prefix cache.
    """

    time_queued: float
    time_to_first_token: float
    time_total: float
    accept_lengths: list[int]
    cached_tokens: int
    preemptions: int

    @property
    def mean_accept_length(self) -> float:
        """Mean tokens gained per verification; 0 where none was made."""
        return sum(self.accept_lengths) / len(self.accept_lengths) if self.accept_lengths else 0.0


@dataclass(frozen=True)
class RequestOutput:
    """A finished request.

    Attributes:
        text: the generated text, stop string excluded unless asked for.
        token_ids: the generated tokens, up to and including a stop token or the token that
            completed a stop string.
        finish_reason: ``"stop"``, ``"length"`` or ``"abort"``.
        stop_reason: the stop string or stop token id that ended it, if one did.
        logprobs: one entry a token where asked for, else ``None``.
    """

    id: str
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: list[TokenLogprobs] | None
    metrics: RequestMetrics
