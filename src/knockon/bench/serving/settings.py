"""What a serving benchmark is asked to do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from knockon.errors import Refused


@dataclass(frozen=True)
class ServingSettings:
    """Checked once.

    Args:
        base_url: of the server, with or without ``/v1``.
        model: as the server calls it; ``None`` asks the server.
        dataset: ShareGPT's JSON, or JSONL.
        num_prompts: how many are drawn; ``None`` for all.
        output_len: tokens asked for; ``None`` for each record's own ``output_len``.
        max_concurrency: requests under way at once; ``None`` for no bound.
        request_rate: requests a second, at Poisson times; infinite sends all at once.
        warmup_requests: sent before, and not counted.
        seed: draws prompts and arrival times.
        chat: through the chat template, else as plain completions.
        flush_cache: whether the server's prefix cache is emptied after the warm-up.
        ignore_eos: ask for exactly ``output_len`` tokens, where the server knows the field.
        temperature, top_p: of every request.
        api_key: sent as a bearer token.
        timeout: seconds for one request.

    Raises:
        Refused: a value out of range.
    """

    base_url: str
    dataset: Path
    model: str | None = None
    num_prompts: int | None = None
    output_len: int | None = None
    max_concurrency: int | None = None
    request_rate: float = math.inf
    warmup_requests: int = 1
    seed: int = 1
    chat: bool = False
    flush_cache: bool = False
    ignore_eos: bool = True
    temperature: float = 0.0
    top_p: float = 1.0
    api_key: str | None = None
    timeout: float = 3600.0

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise Refused("base_url", self.base_url, "http://HOST:PORT")
        for name in ("num_prompts", "output_len", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise Refused(name, value, "at least 1")
        if self.warmup_requests < 0:
            raise Refused("warmup_requests", self.warmup_requests, "0 or more")
        if not self.request_rate > 0:
            raise Refused("request_rate", self.request_rate, "more than 0 a second")
        if not 0 < self.timeout < math.inf:
            raise Refused("timeout", self.timeout, "a number of seconds, more than 0")
        if not 0 <= self.temperature < math.inf:
            raise Refused("temperature", self.temperature, "a number of at least 0")
        if not 0 < self.top_p <= 1:
            raise Refused("top_p", self.top_p, "more than 0, at most 1")

    @property
    def root(self) -> str:
        """The server's address without ``/v1``."""
        return self.base_url.rstrip("/").removesuffix("/v1")
