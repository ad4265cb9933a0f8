"""Prompts by a tokenizer's chat template, cut where the user's words begin and end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from knockon.errors import Refused

_MARK = "\u2042 the user's words \u2042"


def read_prompts(path: Path) -> list[str]:
    """First turns of a JSON-lines file of ``{"turns": [...]}``.

    Raises:
        Refused: a line of another form.
    """
    prompts = []
    for number, line in enumerate(path.read_text().split("\n"), 1):
        if not line.strip():
            continue
        try:
            prompts.append(str(json.loads(line)["turns"][0]))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise Refused(f"{path}:{number}", line[:60], 'a JSON object with "turns"') from error
    return prompts


class ChatFormat:
    """A tokenizer's chat template, cut at the user's words.

    Args:
        tokenizer: with a chat template; ``apply_chat_template`` adds the template's own system
            prompt.
        stop_ids: tokens that end a turn.

    Raises:
        Refused: a template that changes or repeats the user's words.
    """

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = tuple(stop_ids)
        self.before, self.after = self._cut([{"role": "user", "content": _MARK}])

    def _render(self, messages: list[dict[str, str]]) -> str:
        return str(
            self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )

    def _cut(self, messages: list[dict[str, str]]) -> tuple[str, str]:
        parts = self._render(messages).split(_MARK)
        if len(parts) != 2:
            raise Refused("chat_template", len(parts) - 1, "the user's words once, as they are")
        return parts[0], parts[1]

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts that already carry the template's marks."""
        if not texts:
            return []
        return list(self.tokenizer(list(texts), add_special_tokens=False)["input_ids"])

    def encode(self, users: Sequence[str]) -> list[list[int]]:
        """Prompts of one user turn each, up to where the answer begins."""
        return self.ids([self.before + user + self.after for user in users])

    def openings(self, openings: Sequence[str]) -> list[list[int]]:
        """Prompts that end inside the user's turn, after an opening."""
        return self.ids([self.before + opening for opening in openings])

    def between(self) -> list[int]:
        """Tokens between an answer's stop token and the user's next words."""
        answer = "\u2042 the answer \u2042"
        roles = ("user", "assistant", "user")
        turns = [
            {"role": role, "content": text}
            for role, text in zip(roles, ("q", answer, _MARK), strict=True)
        ]
        middle = self._cut(turns)[0].partition(answer)[2]
        ids = self.ids([middle])[0]
        if not ids or ids[0] not in self.stop_ids:
            raise Refused("chat_template", middle, "a stop token right after the answer")
        return ids[1:]

    def decode(self, ids: Sequence[list[int]]) -> list[str]:
        """Texts without special tokens."""
        return [self.tokenizer.decode(row, skip_special_tokens=True) for row in ids]
