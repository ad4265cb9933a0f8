"""What the routes of one server share."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from knockon.engine.occupancy import Capacity
from knockon.server.api_error import ApiError, bad_request
from knockon.server.engine_client import EngineClient, EngineState, first_line
from knockon.server.metrics import Metrics
from knockon.server.prompts import PromptEncoder
from knockon.server.settings import ServerSettings

RETRY_AFTER = "1"  # s


@dataclass
class ServerState:
    """One server.

    Attributes:
        encoder: there once the engine is ready.
        draining: whether a signal has come, after which no request is taken.
        open_requests: generations being answered.
        waiting_to_encode: sequences admitted whose prompts the engine has not got yet.
    """

    settings: ServerSettings
    engine: EngineClient
    metrics: Metrics
    started: float
    encoder: PromptEncoder | None = None
    draining: bool = False
    open_requests: int = 0
    waiting_to_encode: int = 0
    seeds: random.Random | None = field(default=None)

    def __post_init__(self) -> None:
        if self.settings.random_seed is not None:
            self.seeds = random.Random(self.settings.random_seed)

    def why_not_ready(self) -> str:
        """Why no request can be served now; empty where one can."""
        if self.draining:
            return "the server is shutting down"
        if self.engine.state is EngineState.FAILED:
            return f"the engine has failed: {first_line(self.engine.cause)}"
        if self.engine.state is EngineState.LOADING or self.encoder is None:
            return "the model is being loaded"
        return ""

    def serving(self) -> tuple[Capacity, PromptEncoder]:
        """What a request is served with.

        Raises:
            ApiError: 503, while nothing can be served.
        """
        why = self.why_not_ready()
        if why or self.engine.capacity is None or self.encoder is None:
            raise ApiError(503, why, code="not_ready", headers={"Retry-After": RETRY_AFTER})
        return self.engine.capacity, self.encoder

    def check_model(self, name: str | None) -> None:
        """Hold the model asked for to the one there is.

        Raises:
            ApiError: 404.
        """
        if name is not None and name != self.settings.model_name:
            raise ApiError(
                404,
                f"model: found {name!r}, this server has {self.settings.model_name!r}",
                kind="invalid_request_error",
                param="model",
                code="model_not_found",
            )

    def admit(self, sequences: int, capacity: Capacity) -> None:
        """Hold the sequences of a request to the queue's bound.

        Raises:
            ApiError: 429 where the queue is full; 400 where they could never fit.
        """
        limit = capacity.max_batch_size + self.settings.max_queued_requests
        if sequences > limit:
            raise bad_request(f"{sequences} sequences are asked for, at most {limit} fit", "n")
        taken = self.engine.in_flight + self.waiting_to_encode
        if taken + sequences > limit:
            raise ApiError(
                429,
                f"{taken} sequences are running or queued, at most {limit} may be "
                "(--max-running-requests and --max-queued-requests)",
                code="queue_full",
                headers={"Retry-After": RETRY_AFTER},
            )

    def fallback_seed(self) -> int | None:
        """For a request that brings none."""
        return self.seeds.getrandbits(62) if self.seeds is not None else None
