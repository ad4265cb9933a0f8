"""Fields of OpenAI's API and of other servers that are known here, and refused by name.

Whatever changes the answer must not be passed over in silence. Fields that no list knows are
ignored, as OpenAI-compatible servers do.
"""

from __future__ import annotations

from typing import Any

from knockon.server.api_error import ApiError, bad_request
from knockon.server.bodies import ChatBody, CompletionBody, GenerationBody

# Each with the values that ask for nothing.
_NOTHING: tuple[Any, ...] = (None, False, [], {})
_REFUSED: dict[str, tuple[Any, ...]] = {
    "logit_bias": _NOTHING,
    "functions": _NOTHING,
    "function_call": (*_NOTHING, "none", "auto"),
    "audio": _NOTHING,
    "modalities": (*_NOTHING, ["text"]),
    "prediction": _NOTHING,
    "web_search_options": _NOTHING,
    "response_format": (*_NOTHING, {"type": "text"}),
    "structured_outputs": _NOTHING,
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "guided_choice": _NOTHING,
    "guided_grammar": _NOTHING,
    "regex": _NOTHING,
    "json_schema": _NOTHING,
    "ebnf": _NOTHING,
    "suffix": (*_NOTHING, ""),
    "echo": _NOTHING,
    "use_beam_search": _NOTHING,
    "min_tokens": (*_NOTHING, 0),
    "prompt_logprobs": _NOTHING,
    "lora_path": _NOTHING,
    "logits_processors": _NOTHING,
    "continue_final_message": _NOTHING,
}


def refuse_unsupported(body: GenerationBody) -> None:
    """Hold a body's fields against what can be done.

    Raises:
        ApiError: 400, naming the field.
    """
    extra = body.model_extra or {}
    for field, nothing in _REFUSED.items():
        if field in extra and not any(_same(extra[field], each) for each in nothing):
            raise _unsupported(field)
    best_of = extra.get("best_of")
    if best_of is not None and not _same(best_of, body.n or 1):
        raise _unsupported("best_of", "it can only be what n is")
    if isinstance(body, ChatBody):
        _refuse_tool_choice(body)
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    if isinstance(body, CompletionBody) and not body.prompt and body.prompt != "":
        raise bad_request("prompt must hold at least one", "prompt")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream: true", "stream_options")


def _refuse_tool_choice(body: ChatBody) -> None:
    if body.tool_choice not in (None, "none", "auto"):
        raise _unsupported("tool_choice", "the model can be shown tools, not made to call one")


def _unsupported(field: str, why: str = "") -> ApiError:
    text = f"{field} is not supported by this server"
    return bad_request(f"{text}: {why}" if why else text, field, "unsupported_parameter")


def _same(found: Any, other: Any) -> bool:
    return type(found) is type(other) and found == other
