"""From a request's fields to the engine's sampling parameters."""

from __future__ import annotations

from typing import Any

from knockon.engine.sampling_params import SamplingParams
from knockon.errors import Refused
from knockon.server.api_error import bad_request
from knockon.server.bodies import ChatBody, CompletionBody, GenerationBody

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; a chat takes the rest of the context
_PLAIN = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "ignore_eos", "bad_words", "stop_token_ids"),
    *("include_stop_str_in_output", "speculation"),
)
_INT64 = 1 << 63


def sampling_params(
    body: ChatBody | CompletionBody, longest_prompt: int, max_length: int, fallback_seed: int | None
) -> list[SamplingParams]:
    """One a choice of the same prompt. Choice ``i`` of a seeded request has seed ``seed + i``.

    Args:
        longest_prompt: tokens of the longest prompt.
        max_length: positions that a request may reach.
        fallback_seed: taken where the request brings none; ``None`` leaves it to the engine.

    Raises:
        ApiError: 400, naming the field.
    """
    room = max_length - longest_prompt
    if room < 1:
        raise bad_request(
            f"the prompt has {longest_prompt} tokens; at most {max_length - 1} fit the context of "
            f"{max_length}",
            "messages" if isinstance(body, ChatBody) else "prompt",
            "context_length_exceeded",
        )
    field, asked = _max_tokens(body)
    if asked is None:
        asked = room if isinstance(body, ChatBody) else min(room, COMPLETION_TOKENS)
    if asked > room:
        raise bad_request(
            f"{field} is {asked} and the prompt has {longest_prompt} tokens; together at most "
            f"{max_length} fit the context",
            field,
            "context_length_exceeded",
        )
    fields: dict[str, Any] = {
        name: value for name in _PLAIN if (value := getattr(body, name)) is not None
    }
    fields["max_tokens"] = asked
    fields["logprobs"] = _logprobs(body)
    if fallback_seed is not None:
        fields.setdefault("seed", fallback_seed)
    seed = fields.get("seed")
    try:
        params = [SamplingParams(**fields)]
        for index in range(1, body.n or 1):
            if seed is not None:
                fields["seed"] = (seed + index + _INT64) % (2 * _INT64) - _INT64
            params.append(SamplingParams(**fields))
    except Refused as refused:
        raise bad_request(str(refused), refused.field) from None
    return params


def _max_tokens(body: GenerationBody) -> tuple[str, int | None]:
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", body.max_tokens


def _logprobs(body: ChatBody | CompletionBody) -> int | None:
    if isinstance(body, ChatBody):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs
