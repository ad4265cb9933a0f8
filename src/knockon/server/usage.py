"""The ``usage`` of an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Usage:
    """Counts up over the sequences of one request.

    Attributes:
        prompt_tokens: every prompt once.
        cached_tokens: of those, found in the prefix cache by the first sequence of each.
        accept_lengths: tokens kept by each verification, bonus included.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    accept_lengths: list[int] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's fields, and ``speculation``, which is this server's own."""
        kept = sum(self.accept_lengths)
        count = len(self.accept_lengths)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": min(self.cached_tokens, self.prompt_tokens)},
            "completion_tokens_details": {"accepted_prediction_tokens": kept - count},
            "speculation": {
                "verifications": count,
                "accepted_tokens": kept - count,
                "mean_accept_length": round(kept / count, 4) if count else None,
            },
        }
