"""What the target is asked while data is made: given prompts, its own prompts, follow-ups.

Self-written prompts are made as in Magpie (arXiv 2406.08464): the chat template is fed up to the
head of the user's turn and the model, sampling, writes what a user would say. Openings steer it
towards the kinds of work that drafters are wanted for. Answers are greedy, since most serving is;
prompts from a file also get sampled answers.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from knockon.train.bulk_generate import Finished, Job
from knockon.train.chat_format import ChatFormat
from knockon.train.overlap import HeldOutPrompts

OPENINGS: dict[str, tuple[str, ...]] = {
    "free": ("",),
    "code": (
        "Write a Python function",
        "Write a function to",
        "Write a python function to",
        "Complete the following Python function.\n\n```python\ndef",
        "Implement a function that",
        "def ",
        "```python\ndef ",
        "Create a Python class",
        "Fix the bug in this Python code:\n\n",
        "Write a Python program",
        "Given a list of",
        "What does this Python code do?\n\n",
        "from typing import List\n\n\ndef ",
        "Complete this function:\n\ndef",
        "Write a SQL query",
        "Write a function that takes a string",
    ),
    "arithmetic": (
        "A farmer has",
        "A store sells",
        "If a train",
        "Sarah has",
        "Tom bought",
        "There are",
        "Maria is",
        "Each day,",
        "Calculate",
        "John earns $",
        "A recipe calls for",
        "The total cost of",
        "Lisa and",
        "Mr. ",
        "In a class of",
        "How many",
    ),
    "maths": (
        "Solve",
        "Solve for $x$:",
        "Find the value of",
        "What is the",
        "Simplify",
        "Let $",
        "Compute",
        "If $",
        "Evaluate",
        "Find all",
        "A triangle has",
        "What is the probability",
        "Determine",
        "How many positive integers",
        "Let $f(x) =",
        "Prove that",
    ),
    "instruction": (
        "Explain",
        "Describe",
        "List",
        "Summarize",
        "Translate",
        "Classify",
        "Rewrite the following sentence",
        "Generate",
        "Give me",
        "Identify",
        "Compare",
        "Suggest",
        "Create a list of",
        "Design",
        "Name",
        "Edit the following",
        "What are the",
        "Convert",
        "Find the",
        "Provide",
    ),
    "writing": (
        "Write a",
        "Write an essay",
        "Write a short story",
        "Compose",
        "Draft an email",
        "Write a poem",
        "Write a blog post",
        "Imagine you are",
        "Pretend to be",
        "Write a letter",
        "Write a persuasive",
    ),
    "questions": (
        "What",
        "How",
        "Why",
        "How do I",
        "Can you",
        "Who",
        "When",
        "Which",
        "I have",
        "I need",
        "I want to",
        "Is it",
        "Tell me about",
        "Could you",
        "What is the difference between",
        "Discuss",
    ),
}
"""Openings by kind of work; kinds are drawn with `KIND_WEIGHTS`, openings evenly."""

KIND_WEIGHTS = {
    "free": 2.0,
    "code": 3.5,
    "arithmetic": 1.5,
    "maths": 2.0,
    "instruction": 2.0,
    "writing": 1.5,
    "questions": 1.5,
}


@dataclass(frozen=True)
class RecipeSettings:
    """Shares and bounds of the data.

    Attributes:
        max_prompt: prompts longer than this are dropped.
        max_user: self-written turns longer than this many tokens are dropped.
        max_new: cap on an answer.
        prompt_temperature: of self-written turns.
        sampled_temperatures: one more answer to each prompt of the file for each of these.
        file_share: share of new jobs taken from the file while it lasts.
        follow_up_share: share of finished first answers that get a second turn.
        self_written: whether the target writes prompts; else the file is all there is.
    """

    max_prompt: int = 384
    max_user: int = 160
    max_new: int = 192
    prompt_temperature: float = 1.0
    sampled_temperatures: tuple[float, ...] = (0.7, 1.0)
    file_share: float = 0.25
    follow_up_share: float = 0.1
    self_written: bool = True
    seed: int = 0


@dataclass
class Counts:
    """What became of the jobs, for the progress line and the model card."""

    prompts_written: int = 0
    prompts_kept: int = 0
    prompts_held_out: int = 0
    answers: dict[str, int] = field(default_factory=dict)
    answer_tokens: int = 0


class Recipe:
    """The endless list of jobs, fed by what comes back: answers to written prompts, follow-ups.

    Give `next_jobs` and `finished` to a `BulkGenerator`; `sequences` grows.

    Args:
        held_out: prompts that are dropped wherever they come from.
        answered: prompts, as ids, that an earlier run has answered: not taken from the file again.
    """

    def __init__(
        self,
        chat: ChatFormat,
        file_prompts: Sequence[str],
        settings: RecipeSettings,
        held_out: HeldOutPrompts | None = None,
        answered: Set[tuple[int, ...]] = frozenset(),
    ) -> None:
        self.chat = chat
        self.settings = settings
        self.random = random.Random(settings.seed)
        self.counts = Counts()
        self.sequences: list[tuple[array[int], array[int]]] = []
        self._held_out = held_out
        self._answered = answered
        self._ready: deque[Job] = deque()
        self._seen: set[str] = set()
        self._openings = {kind: chat.openings(texts) for kind, texts in OPENINGS.items()}
        self._between = chat.between()
        self._file: deque[Job] = deque()
        self._add_file(list(dict.fromkeys(file_prompts)))

    def _add_file(self, prompts: list[str]) -> None:
        prompts = [prompt for prompt in prompts if not self._is_held_out(prompt)]
        self.random.shuffle(prompts)
        self._seen.update(prompts)
        encoded = [
            ids
            for ids in self.chat.encode(prompts)
            if len(ids) <= self.settings.max_prompt and tuple(ids) not in self._answered
        ]
        for temperature in (0.0, *self.settings.sampled_temperatures):
            self._file.extend(
                Job(ids, self.settings.max_new, temperature, "file") for ids in encoded
            )

    def _is_held_out(self, prompt: str) -> bool:
        found = self._held_out is not None and self._held_out.overlaps(prompt)
        self.counts.prompts_held_out += found
        return found

    def next_jobs(self, count: int) -> list[Job]:
        """Answers first, so that a run cut short leaves few prompts unanswered."""
        jobs = [self._ready.popleft() for _ in range(min(count, len(self._ready)))]
        if not self.settings.self_written:
            room = min(count - len(jobs), len(self._file))
            return jobs + [self._file.popleft() for _ in range(room)]
        while len(jobs) < count:
            if self._file and self.random.random() < self.settings.file_share:
                jobs.append(self._file.popleft())
            else:
                kind = self.random.choices(list(KIND_WEIGHTS), list(KIND_WEIGHTS.values()))[0]
                number = self.random.randrange(len(self._openings[kind]))
                ids = self._openings[kind][number]
                jobs.append(
                    Job(
                        ids,
                        self.settings.max_user,
                        self.settings.prompt_temperature,
                        f"write {kind} {number}",
                    )
                )
        return jobs

    def finished(self, done: list[Finished]) -> None:
        """Sorts what ended: new prompts are queued, answers are kept."""
        turns = [item for item in done if item.job.kind.startswith("write ")]
        follow_ups = [item for item in done if item.job.kind.startswith("follow ")]
        answers = [item for item in done if not item.job.kind.startswith(("write ", "follow "))]
        self._queue_answers(turns)
        self._queue_follow_ups(follow_ups)
        self._keep(answers)

    def _queue_answers(self, turns: list[Finished]) -> None:
        self.counts.prompts_written += len(turns)
        texts, kinds = [], []
        for item, written in zip(
            turns, self.chat.decode([item.tokens for item in turns]), strict=True
        ):
            _, kind, number = item.job.kind.split(" ")
            text = (OPENINGS[kind][int(number)] + written).strip()
            if item.stopped and usable(text) and text not in self._seen:
                self._seen.add(text)
                if self._is_held_out(text):
                    continue
                texts.append(text)
                kinds.append(kind)
        for ids, kind in zip(self.chat.encode(texts), kinds, strict=True):
            if len(ids) <= self.settings.max_prompt:
                self.counts.prompts_kept += 1
                self._ready.append(Job(ids, self.settings.max_new, 0.0, kind))

    def _queue_follow_ups(self, items: list[Finished]) -> None:
        texts = []
        for item, written in zip(
            items, self.chat.decode([item.tokens for item in items]), strict=True
        ):
            if item.stopped and usable(written.strip()):
                conversation = self.chat.tokenizer.decode(item.job.prompt)
                texts.append(conversation + written.strip() + self.chat.after)
        for ids in self.chat.ids(texts):
            if len(ids) <= self.settings.max_prompt:
                self._ready.append(Job(ids, self.settings.max_new, 0.0, "second"))

    def _keep(self, answers: list[Finished]) -> None:
        counts, chosen = self.counts, []
        for item in answers:
            if len(item.tokens) < 4:
                continue
            self.sequences.append((array("i", item.job.prompt), array("i", item.tokens)))
            counts.answers[item.job.kind] = counts.answers.get(item.job.kind, 0) + 1
            counts.answer_tokens += len(item.tokens)
            room = self.settings.max_prompt - self.settings.max_user // 2
            fits = len(item.job.prompt) + len(item.tokens) <= room
            wanted = (
                self.settings.self_written and item.stopped and fits and item.job.kind != "second"
            )
            if wanted and self.random.random() < self.settings.follow_up_share:
                chosen.append(item)
        for item in chosen:
            prompt = item.job.prompt + item.tokens + self._between
            self._ready.append(
                Job(prompt, self.settings.max_user, self.settings.prompt_temperature, "follow ")
            )


def usable(text: str) -> bool:
    """Whether a written turn is worth an answer: long enough, printable, not one word repeated."""
    words = text.split()
    if len(text) < 12 or len(words) < 3:
        return False
    return len(set(words)) >= 0.3 * len(words) and sum(
        c.isprintable() or c == "\n" for c in text
    ) >= 0.98 * len(text)
