"""What a caller may give as a prompt, held to its form before the tokenizer sees it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from knockon.engine.prompt_ids import checked_prompt
from knockon.errors import Refused
from knockon.models.tokenizer import load_tokenizer

Message = dict[str, str]
Prompt = str | Sequence[int] | Sequence[Message]

_WANTED = "a string, a list of messages or a list of token ids"


def load_prompt_tokenizer(model: str | Path) -> Any:
    """The tokenizer of a model by itself, for a process that has no engine.

    Raises:
        Refused: as :func:`~knockon.models.tokenizer.load_tokenizer`.
    """
    return load_tokenizer(model)


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list.

    Raises:
        Refused: neither, or an empty list.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, dict) or not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise Refused("prompts", prompts, f"{_WANTED}, or a list of such")
    if not prompts:
        raise Refused("prompts", prompts, "at least one prompt")
    if isinstance(prompts[0], int | dict):
        return [prompts]
    return list(prompts)


def encode_prompt(tokenizer: Any, prompt: Any) -> list[int]:
    """The token ids of a prompt.

    Raises:
        Refused: an empty prompt, one of another form, messages without a role or content or that
            the chat template rejects, or text that is not Unicode.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise Refused("prompt", prompt, "text that is not empty")
        _check_unicode("prompt", prompt)
        return list(tokenizer.encode(prompt))
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise Refused("prompt", prompt, _WANTED)
    if prompt and isinstance(prompt[0], dict):
        return _encode_messages(tokenizer, prompt)
    return checked_prompt(prompt, 1 << 31)


def _encode_messages(tokenizer: Any, messages: Sequence[Any]) -> list[int]:
    for message in messages:
        if not isinstance(message, dict):
            raise Refused("message", message, "an object with a role and content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise Refused(f"message {key}", message.get(key), "a string")
            _check_unicode(f"message {key}", message[key])
    if not tokenizer.chat_template:
        raise Refused("chat_template", None, "a model whose tokenizer has one")
    from jinja2 import TemplateError

    try:
        return list(
            tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )
    except (TemplateError, TypeError, ValueError) as error:
        # Templates reject conversations of their own accord (roles that do not alternate, say).
        reason = " ".join(str(error).split())
        raise Refused(
            "messages",
            [message["role"] for message in messages],
            f"what the template takes: {reason}",
        ) from error


def _check_unicode(field: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = text[error.start : error.start + 1]
        raise Refused(
            field, found, "Unicode text (this is half of a character, or a stray byte)"
        ) from None
