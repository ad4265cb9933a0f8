"""A prompt as token ids, held to a vocabulary; without torch, for processes that never compute."""

from __future__ import annotations

from collections.abc import Sequence

from knockon.errors import Refused


def checked_prompt(prompt: Sequence[int], vocab_size: int) -> list[int]:
    """A prompt's token ids.

    Raises:
        Refused: none, or one outside the vocabulary.
    """
    ids = list(prompt)
    if not ids:
        raise Refused("prompt", ids, "at least one token")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise Refused("prompt token id", token, f"an integer from 0 to {vocab_size - 1}")
    return ids
