"""Prompts go through the template exactly, and what comes back is sorted."""

from __future__ import annotations

from pathlib import Path

import pytest

from knockon.errors import Refused
from knockon.models.tokenizer import load_tokenizer
from knockon.train.bulk_generate import Finished, Job
from knockon.train.chat_format import ChatFormat, read_prompts
from knockon.train.synthesize import Recipe, RecipeSettings, usable


@pytest.fixture(scope="module")
def chat(smollm2_path: Path) -> ChatFormat:
    return ChatFormat(load_tokenizer(smollm2_path), (2,))


def test_prompts_are_those_of_the_template(chat: ChatFormat) -> None:
    messages = [{"role": "user", "content": "Hello, 2 + 2?"}]
    text = chat.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    want = chat.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert chat.encode(["Hello, 2 + 2?"]) == [want]
    assert "You are a helpful AI assistant" in chat.before


def test_a_second_turn_is_the_template_s(chat: ChatFormat) -> None:
    turns = [
        {"role": "user", "content": "Hi there"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "How are you?"},
    ]
    text = chat.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    first = chat.encode(["Hi there"])[0] + chat.ids(["Hello!<|im_end|>"])[0] + chat.between()
    assert chat.tokenizer.decode(first) + "How are you?" + chat.after == text


def test_a_written_turn_becomes_a_greedy_job_once(chat: ChatFormat) -> None:
    recipe = Recipe(chat, [], RecipeSettings(follow_up_share=0.0))
    job = recipe.next_jobs(1)[0]
    assert job.temperature > 0
    written = chat.ids([" the number of vowels in a given string of letters.<|im_end|>"])[0]
    done = Finished(Job(job.prompt, 160, 1.0, "write code 0"), written, True)
    recipe.finished([done, done])
    jobs = recipe.next_jobs(2)
    assert jobs[0].temperature == 0 and jobs[0].kind == "code"
    assert chat.decode([jobs[0].prompt])[0].count("the number of vowels") == 1
    assert jobs[1].kind.startswith("write ")
    recipe.finished([Finished(jobs[0], [5, 6, 7, 8, 2], True)])
    kept = [(list(prompt), list(answer)) for prompt, answer in recipe.sequences]
    assert kept == [(jobs[0].prompt, [5, 6, 7, 8, 2])]


def test_follow_ups_carry_the_conversation(chat: ChatFormat) -> None:
    settings = RecipeSettings(follow_up_share=1.0, file_share=1.0, sampled_temperatures=())
    recipe = Recipe(chat, ["Name three colours."], settings)
    job = recipe.next_jobs(1)[0]
    answer = chat.ids(["Red, green and blue.<|im_end|>"])[0]
    recipe.finished([Finished(job, answer, True)])
    follow = recipe.next_jobs(1)[0]
    written = chat.ids(["And which of them is the warmest?<|im_end|>"])[0]
    recipe.finished([Finished(follow, written, True)])
    second = recipe.next_jobs(1)[0]
    text = chat.tokenizer.decode(second.prompt)
    assert text.endswith("And which of them is the warmest?<|im_end|>\n<|im_start|>assistant\n")
    assert text.count("Red, green and blue.") == 1 and second.temperature == 0


def test_a_template_that_drops_the_user_is_refused() -> None:
    class Deaf:
        def apply_chat_template(self, messages: object, **_: object) -> str:
            return "nothing"

    with pytest.raises(Refused, match="chat_template"):
        ChatFormat(Deaf(), (2,))


def test_usable_turns() -> None:
    assert usable("Write a poem about the sea.")
    assert not usable("ok")
    assert not usable("go " * 30)


def test_prompt_files(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["one\u2028line", "second turn"]}\n\n{"turns": ["two"]}\n')
    assert read_prompts(file) == ["one\u2028line", "two"]
    file.write_text('{"turns": []}\n')
    with pytest.raises(Refused, match=r"prompts\.jsonl:1"):
        read_prompts(file)
