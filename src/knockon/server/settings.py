"""What a server is asked to be, besides its engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from knockon.errors import Refused

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the HTTP side, and those of :class:`~knockon.engine.config.EngineConfig`.

    Args:
        engine: fields of ``EngineConfig``, ``model`` among them.
        host, port: where to listen; port 0 takes a free one.
        served_model_name: what clients call the model; ``None`` for ``model`` as given.
        api_key: what clients must send as a bearer token; ``None`` asks for none.
        chat_template: Jinja source in place of the tokenizer's own template.
        max_queued_requests: sequences that may wait beside those computed; beyond, 429.
        max_body_bytes: the largest request body; beyond, 413.
        random_seed: fixes the noise of requests that bring no seed, by order of arrival.
        watchdog_timeout: seconds of silence after which the engine counts as hung.
        drain_timeout: seconds that requests get to finish after SIGTERM.
        log_level: ``debug``, ``info``, ``warning`` or ``error``.

    Raises:
        Refused: a value of the wrong type or out of range.
    """

    engine: dict[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 30000
    served_model_name: str | None = None
    api_key: str | None = None
    chat_template: str | None = None
    max_queued_requests: int = 256
    max_body_bytes: int = 4 << 20
    random_seed: int | None = None
    watchdog_timeout: float = 300.0
    drain_timeout: float = 600.0
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise Refused("port", self.port, "0 to 65535")
        if self.api_key is not None and (not self.api_key or not self.api_key.isascii()):
            raise Refused("api_key", "a key", "ASCII text that is not empty")
        if self.served_model_name is not None and not self.served_model_name:
            raise Refused("served_model_name", "", "a name")
        if self.max_queued_requests < 0:
            raise Refused("max_queued_requests", self.max_queued_requests, "0 or more")
        if self.max_body_bytes < 1:
            raise Refused("max_body_bytes", self.max_body_bytes, "1 or more")
        for name in ("watchdog_timeout", "drain_timeout"):
            if not getattr(self, name) > 0:
                raise Refused(name, getattr(self, name), "more than 0 seconds")
        if self.log_level not in LOG_LEVELS:
            raise Refused("log_level", self.log_level, f"one of {', '.join(LOG_LEVELS)}")

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or str(self.engine["model"])
