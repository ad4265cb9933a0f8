"""Timing one request after another, with and without a drafter, on the same prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from knockon.engine.llm import LLM, Prompt
from knockon.engine.sampling_params import SamplingParams


@dataclass
class Run:
    """One configuration over a list of prompts at batch 1.

    Attributes:
        seconds: per prompt, from queueing to the last token.
        first_token: per prompt, seconds to the first token.
        tokens: per prompt, the ids generated.
        accept_lengths: of every verification of every prompt.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole time, prefill included."""
        return sum(len(t) for t in self.tokens) / sum(self.seconds)

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first over the time after it."""
        count = sum(len(t) - 1 for t in self.tokens)
        spent = sum(self.seconds) - sum(self.first_token)
        return count / spent if spent else 0.0

    @property
    def mean_accept_length(self) -> float:
        """Tokens gained per verification."""
        lengths = self.accept_lengths
        return sum(lengths) / len(lengths) if lengths else 0.0

    def identical_to(self, other: Run) -> int:
        """How many prompts were answered with the same tokens."""
        return sum(a == b for a, b in zip(self.tokens, other.tokens, strict=True))

    def summary(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return {
            "name": self.name,
            "output_tokens": sum(len(t) for t in self.tokens),
            "seconds": round(sum(self.seconds), 4),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "decode_tokens_per_second": round(self.decode_tokens_per_second, 2),
            "mean_time_to_first_token": round(sum(self.first_token) / len(self.first_token), 4),
            "mean_accept_length": round(self.mean_accept_length, 3),
        }


def run_prompts(
    run: Run, llm: LLM, prompts: Sequence[Prompt], params: SamplingParams
) -> Iterator[None]:
    """Answer the prompts one at a time, adding to ``run`` and yielding after each."""
    for prompt in prompts:
        [output] = llm.generate([prompt], params)
        run.seconds.append(output.metrics.time_total)
        run.first_token.append(output.metrics.time_to_first_token)
        run.tokens.append(output.token_ids)
        run.texts.append(output.text)
        run.accept_lengths += output.metrics.accept_lengths
        yield
