"""Request bodies: what is understood, of which type. Fields not named here are kept for refusals.

Names and meanings are OpenAI's; those below "extra" are what other open servers add.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Strings = Annotated[list[str], Field(max_length=64)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(_Body):
    """``include_usage``: a last chunk with the usage. ``continuous_usage_stats``: one in each."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(_Body):
    """What both endpoints take."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[Int32, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # extra
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    bad_words: Strings | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    speculation: bool | None = None


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class ChatMessage(_Body):
    """One message of a conversation. Further fields go to the chat template as they are."""

    role: Annotated[str, Field(min_length=1)]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[Int32, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    # extra
    chat_template_kwargs: dict[str, Any] | None = None
