"""Prompts from a file: ShareGPT's conversations, or one JSON object a line."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knockon.errors import Refused

_WANTED = "'conversations', 'prompt' (text), 'messages' (objects) or 'turns' (texts)"


@dataclass(frozen=True)
class BenchPrompt:
    """One request to be sent.

    Attributes:
        messages: a conversation that ends with the user's turn.
        output_len: tokens that the record asks for, if it says.
    """

    name: str
    messages: list[dict[str, str]]
    output_len: int | None = None

    @property
    def text(self) -> str:
        """The last turn alone, for servers asked without a chat template."""
        return self.messages[-1]["content"]


def read_dataset(path: Path) -> list[BenchPrompt]:
    """Every usable prompt, in the order of the file.

    ShareGPT's procedure: conversations of two turns or more, of which the first is the prompt.

    Raises:
        Refused: a file that cannot be read, a record of another form, or no prompt at all.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused("dataset_path", str(path), f"a readable UTF-8 file ({error})") from None
    if text.lstrip().startswith("["):
        records = _load(text, path, "the file")
    else:
        # Not splitlines: a JSON string may hold U+2028 as it stands.
        lines = [line for line in text.split("\n") if line.strip()]
        records = [_load(line, path, f"line {i}") for i, line in enumerate(lines, 1)]
    found = [_prompt(record, i, path) for i, record in enumerate(records)]
    prompts = [prompt for prompt in found if prompt is not None]
    if not prompts:
        raise Refused("dataset_path", str(path), "at least one prompt")
    return prompts


def draw(prompts: list[BenchPrompt], count: int | None, seed: int) -> list[BenchPrompt]:
    """``count`` of them at random without repetition; all, in order, with ``None``.

    Raises:
        Refused: more than there are.
    """
    if count is None:
        return list(prompts)
    if count > len(prompts):
        raise Refused("num_prompts", count, f"at most the {len(prompts)} of the dataset")
    return random.Random(seed).sample(prompts, count)


def _load(text: str, path: Path, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused("dataset_path", str(path), f"JSON; {where} is not ({error})") from None


def _prompt(record: Any, index: int, path: Path) -> BenchPrompt | None:
    if not isinstance(record, dict):
        raise Refused(f"dataset record {index}", str(record)[:60], f"an object with {_WANTED}")
    name = str(record.get("id", index))
    length = record.get("output_len")
    if length is not None and (not isinstance(length, int) or length < 1):
        raise Refused(f"dataset record {index} output_len", length, "an integer of at least 1")
    conversation = record.get("conversations", record.get("conversation"))
    if isinstance(conversation, list):
        values = [turn.get("value") for turn in conversation if isinstance(turn, dict)]
        # One turn alone has nothing that was answered: the procedure leaves it out.
        usable = len(values) >= 2 and isinstance(values[0], str) and values[0].strip()
        return BenchPrompt(name, _user(values[0]), length) if usable else None  # type: ignore[arg-type]
    messages, turns, prompt = record.get("messages"), record.get("turns"), record.get("prompt")
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return BenchPrompt(name, messages, length)
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return BenchPrompt(name, _user(turns[0]), length)
    if isinstance(prompt, str) and prompt.strip():
        return BenchPrompt(name, _user(prompt), length)
    raise Refused(f"dataset record {index} of {path}", sorted(record), _WANTED)


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
