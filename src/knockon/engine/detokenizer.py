"""Text from token ids as they come, character by whole character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

# What a decoder puts for bytes that are not UTF-8 (or not yet).
_REPLACEMENT = "\ufffd"
# A character is at most 4 bytes, so at most 3 of them can be waiting for the rest.
_MOST_WAITING = 3
# Calls after which a window is closed all the same: text that never ends in a whole character, or
# no text at all (a run of special tokens), must not make the window grow for ever.
_MOST_CALLS = 64


class Decoder(Protocol):
    """The one call of a tokenizer that is needed here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, **options: Any) -> Any: ...


class Detokenizer:
    """Incremental decoding of one request's output.

    Decodes a short window again at each call, never the whole: the tokens since the last place
    where the text ended in a whole character, and the stretch before it as the context that some
    tokenizers need for spaces (the prefix offset and read offset of other engines). The pieces,
    joined, are the decoding of all ids at once.

    Args:
        tokenizer: a ``transformers`` tokenizer, or anything with its ``decode``.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Decoder, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._context = 0  # tokens of the window that are context only
        self._sent = 0  # characters of the window's text already given out
        self._calls = 0  # since the window was last closed

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that ``token_ids`` complete; the bytes of a broken character are held back."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        whole = text.rstrip(_REPLACEMENT)
        whole = text[: max(len(whole), len(text) - _MOST_WAITING)]
        self._calls += 1
        overdue = self._calls >= _MOST_CALLS
        if overdue:
            whole = text
        piece = whole[self._sent :]
        self._sent += len(piece)
        if overdue or (piece and whole == text):
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._sent = len(self._decode(self._window))
            self._calls = 0
        return piece

    def flush(self, token_ids: Sequence[int] = ()) -> str:
        """The last text: that of ``token_ids`` and what was held back, broken characters as U+FFFD.

        One decoding, where :meth:`add` takes two: a whole output may be given here at once.
        """
        self._window.extend(token_ids)
        piece = self._decode(self._window)[self._sent :]
        self._sent += len(piece)
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids,
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text
