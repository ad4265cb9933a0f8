"""How the two endpoints dress what a sequence gained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from knockon.server.messages import TokenInfo


class AnswerParts(Protocol):
    """The difference between a chat's and a completion's answer.

    Attributes:
        whole, chunk: ``object`` of a whole answer and of a part of a stream.
        prefix: of the answer's id.
    """

    whole: str
    chunk: str
    prefix: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice that a stream begins with, if any."""
        ...

    def piece(self, index: int, text: str, infos: Sequence[TokenInfo] | None) -> dict[str, Any]:
        """A choice of a chunk: new text."""
        ...

    def complete(self, index: int, text: str, infos: Sequence[TokenInfo] | None) -> dict[str, Any]:
        """A choice of a whole answer."""
        ...


class ChatParts:
    """``chat.completion``.

    Args:
        tokenizer: for the text of single tokens.
    """

    whole, chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def opening(self, index: int) -> dict[str, Any] | None:
        """The role, ahead of any text."""
        return _choice(index, delta={"role": "assistant", "content": ""}, logprobs=None)

    def piece(self, index: int, text: str, infos: Sequence[TokenInfo] | None) -> dict[str, Any]:
        """New text."""
        delta = {"content": text} if text or infos else {}
        return _choice(index, delta=delta, logprobs=self._logprobs(infos))

    def complete(self, index: int, text: str, infos: Sequence[TokenInfo] | None) -> dict[str, Any]:
        """The message."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return _choice(index, message=message, logprobs=self._logprobs(infos))

    def _logprobs(self, infos: Sequence[TokenInfo] | None) -> dict[str, Any] | None:
        if infos is None:
            return None
        content = []
        for info in infos:
            top = [self._entry(token, value) for token, value in info.top]
            content.append({**self._entry(info.token, info.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = token_text(self._tokenizer, token)
        # A token may be part of a character, and then has no text of its own.
        raw = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": finite(logprob), "bytes": raw}


class CompletionParts:
    """``text_completion``.

    Args:
        tokenizer: for the text of single tokens.
        sequences: how many choices there are; each keeps where its text has come to.
    """

    whole = chunk = "text_completion"
    prefix = "cmpl-"

    def __init__(self, tokenizer: Any, sequences: int) -> None:
        self._tokenizer = tokenizer
        self._offsets = [0] * sequences

    def opening(self, index: int) -> dict[str, Any] | None:
        """Nothing: the first chunk has text."""
        return None

    def piece(self, index: int, text: str, infos: Sequence[TokenInfo] | None) -> dict[str, Any]:
        """New text."""
        return _choice(index, text=text, logprobs=self._logprobs(index, infos))

    def complete(self, index: int, text: str, infos: Sequence[TokenInfo] | None) -> dict[str, Any]:
        """The whole text."""
        return self.piece(index, text, infos)

    def _logprobs(self, index: int, infos: Sequence[TokenInfo] | None) -> dict[str, Any] | None:
        if infos is None:
            return None
        tokens = [token_text(self._tokenizer, info.token) for info in infos]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        top = []
        for info in infos:
            found = {token_text(self._tokenizer, token): finite(v) for token, v in info.top}
            found.setdefault(token_text(self._tokenizer, info.token), finite(info.logprob))
            top.append(found)
        return {
            "tokens": tokens,
            "token_logprobs": [finite(info.logprob) for info in infos],
            "top_logprobs": top if any(info.top for info in infos) else None,
            "text_offset": offsets,
        }


def token_text(tokenizer: Any, token: int) -> str:
    """One token by itself; special tokens by their name."""
    text: str = tokenizer.decode(
        [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999.0."""
    return max(logprob, -9999.0)


def _choice(index: int, **fields: Any) -> dict[str, Any]:
    return {"index": index, **fields, "finish_reason": None}
