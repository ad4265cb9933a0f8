"""A prompt is a string, messages or token ids; anything else is refused before it is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from knockon.engine.prompts import as_prompts, encode_prompt
from knockon.errors import Refused


class Tokenizer:
    """Encodes to code points; its template rejects what does not begin with a user."""

    chat_template = "{{ a template }}"

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        from jinja2 import TemplateError

        if messages[0]["role"] != "user":
            raise TemplateError("Conversation roles must alternate")
        return self.encode(messages[0]["content"])


@pytest.mark.parametrize(
    "prompts", [5, None, b"bytes", {"role": "user", "content": "x"}, [], {1, 2}, np.arange(3)]
)
def test_what_is_no_prompt_is_refused(prompts: Any) -> None:
    with pytest.raises(Refused, match="prompts: found"):
        as_prompts(prompts)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("", "prompt: found ''"),
        (None, "prompt: found None"),
        (b"bytes", "prompt: found b'bytes'"),
        (7.5, "prompt: found 7.5"),
        ([], "at least one token"),
        ([1, "a"], "token id: found 'a'"),
        ("half \ud83d", "Unicode text"),
        ([{"role": "user", "content": "\udcff"}], "message content.*Unicode text"),
        ([{"role": "user", "content": "x"}, "y"], "message: found 'y'"),
        ([{"role": "user"}], "message content: found None"),
        ([{"role": "assistant", "content": "x"}], r"\['assistant'\].*roles must alternate"),
    ],
)
def test_a_prompt_of_another_form_is_refused(prompt: Any, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        encode_prompt(Tokenizer(), prompt)


def test_the_three_forms_are_encoded() -> None:
    for one in ("hé", [104, 233], [{"role": "user", "content": "hé"}]):
        assert [encode_prompt(Tokenizer(), p) for p in as_prompts(one)] == [[104, 233]]
        assert len(as_prompts([one, one])) == 2
