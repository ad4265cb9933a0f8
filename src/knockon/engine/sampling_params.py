"""What a request asks of sampling and stopping, checked once, when it is made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from knockon.errors import Refused

_INT64 = 1 << 63


# Stop strings are looked for, and bad words held against the output, after every step.
MOST_STRINGS = 64
LONGEST_STRING = 256


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends. Names and meanings follow vLLM's.

    Args:
        temperature: divides the logits; 0 is greedy (argmax, exact ties to the lowest id). The
            default is 1.0, the model's own distribution.
        top_p: keeps the most probable tokens until their mass reaches it, in (0, 1]; 1 is off.
        top_k: keeps the ``top_k`` most probable tokens (and ties of the last); 0 or -1 is off.
        min_p: keeps tokens at least this fraction as probable as the most probable; 0 is off.
        seed: fixes the noise, so that the same request gives the same tokens in any batch, with
            or without speculation. ``None``: the engine draws a fresh one for every request.
        max_tokens: most tokens to generate, at least 1.
        stop: strings that end the request, at most 64 of 256 characters; a lone string is taken
            as one.
        stop_token_ids: ids that end the request, besides the model's end-of-sequence ids.
        ignore_eos: generate past the model's end-of-sequence ids (``stop_token_ids`` still end).
        bad_words: strings never to be generated; the last token of each is banned where the
            tokens before it have just been generated. Tokens decide, as in vLLM: the same letters
            otherwise divided (at the head of a longer word, say) are not found.
        logprobs: how many of the most probable tokens to report at each position beside the
            drawn one, from the raw logits; ``None``: report nothing.
        repetition_penalty: divides (positive) or multiplies (negative) the logits of tokens of the
            prompt and the output; above 0, 1 is off.
        presence_penalty: subtracted from the logits of tokens already in the output, in [-2, 2].
        frequency_penalty: subtracted once for each time a token is in the output, in [-2, 2].
        include_stop_str_in_output: leave the stop string (or stop token) at the end of the text.
        speculation: whether proposals may be accepted. Without, each step gives one token, as the
            target alone would; with or without, the tokens are the same.

    Raises:
        Refused: a value is of the wrong type or out of range; names the field and the value.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    bad_words: Sequence[str] = ()
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    include_stop_str_in_output: bool = False
    speculation: bool = True

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        number = "a finite number"
        put("temperature", _real("temperature", self.temperature, 0, math.inf, f"{number} >= 0"))
        put("top_p", _real("top_p", self.top_p, 0, 1, f"{number} in (0, 1]", open_low=True))
        put("min_p", _real("min_p", self.min_p, 0, 1, f"{number} in [0, 1]"))
        put(
            "repetition_penalty",
            _real(
                "repetition_penalty",
                self.repetition_penalty,
                0,
                math.inf,
                f"{number} > 0",
                open_low=True,
            ),
        )
        for name in ("presence_penalty", "frequency_penalty"):
            put(name, _real(name, getattr(self, name), -2, 2, f"{number} in [-2, 2]"))
        top_k = _integer("top_k", self.top_k, -1, "an integer >= 1, or 0 or -1 for off")
        put("top_k", max(top_k, 0))
        put("max_tokens", _integer("max_tokens", self.max_tokens, 1, "an integer >= 1"))
        if self.seed is not None:
            wanted = "a 64-bit signed integer or None"
            seed = _integer("seed", self.seed, -_INT64, wanted)
            if seed >= _INT64:
                raise Refused("seed", self.seed, wanted)
            put("seed", seed)
        if self.logprobs is not None:
            wanted = "an integer >= 0 or None"
            put("logprobs", _integer("logprobs", self.logprobs, 0, wanted))
        for name in ("ignore_eos", "include_stop_str_in_output", "speculation"):
            if not isinstance(getattr(self, name), bool):
                raise Refused(name, getattr(self, name), "True or False")
        for name in ("stop", "bad_words"):
            put(name, _strings(name, getattr(self, name)))
        put("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        """Whether no noise is drawn."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether any of the three penalties changes a logit."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def needs_history(self) -> bool:
        """Whether what is drawn depends on the tokens before, not on their logits alone."""
        return self.penalised or bool(self.bad_words)


def _real(
    name: str, value: object, low: float, high: float, wanted: str, open_low: bool = False
) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise Refused(name, value, wanted)
    try:
        number = float(value)
    except OverflowError:
        raise Refused(name, value, wanted) from None
    too_low = number <= low if open_low else number < low
    if not math.isfinite(number) or too_low or number > high:
        raise Refused(name, value, wanted)
    return number


def _integer(name: str, value: object, low: int, wanted: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
        raise Refused(name, value, wanted)
    return int(value)


def _strings(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, list | tuple):
        raise Refused(name, value, "a list of non-empty strings")
    if len(value) > MOST_STRINGS:
        raise Refused(name, f"{len(value)} strings", f"at most {MOST_STRINGS}")
    for item in value:
        if not isinstance(item, str) or not item:
            raise Refused(name, item, "non-empty strings")
        if len(item) > LONGEST_STRING:
            raise Refused(name, f"{len(item)} characters", f"at most {LONGEST_STRING} in a string")
        try:
            item.encode()
        except UnicodeEncodeError:
            raise Refused(name, ascii(item), "text that can be encoded as UTF-8") from None
    return tuple(value)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple | set | frozenset):
        raise Refused(name, value, "a list of token ids")
    return tuple(_integer(name, item, 0, "token ids (integers >= 0)") for item in value)
