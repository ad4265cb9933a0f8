"""Where an output ends: ids, strings, the cap, inside a block and across blocks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knockon.engine.sampling_params import SamplingParams
from knockon.engine.stopping import Emitted, StopChecker

EOS = 0


class Pieces:
    """A tokenizer of text pieces; id 0 is the special end of sequence, 9 the bytes of half an é."""

    texts = ("", "a", "b", "c", "ab", "bc", "abc", " ", "é")

    def decode(self, token_ids: list[int], **_: bool) -> str:
        return "".join("\ufffd" if i == 9 else self.texts[i] for i in token_ids)


def checker(limit: int | None = None, **options: Any) -> StopChecker:
    return StopChecker(SamplingParams(**options), Pieces(), [EOS], limit)


def test_tokens_after_a_stop_inside_a_block_are_dropped() -> None:
    stops = checker()
    assert stops.add([1, 2]) == Emitted(2, "ab", None, None)
    assert stops.add([3, EOS, 1, 1]) == Emitted(2, "c", "stop", None)
    assert stops.token_ids == [1, 2, 3, EOS] and stops.text == "abc"
    assert stops.add([1]) == Emitted(0, "", "stop", None)


@pytest.mark.parametrize(
    ("options", "block", "expected"),
    [
        ({}, [1, 1, EOS], Emitted(3, "aa", "stop", None)),
        ({"stop_token_ids": [3]}, [1, 1, 3], Emitted(3, "aa", "stop", 3)),
        ({"stop": "bc"}, [1, 2, 3], Emitted(3, "a", "stop", "bc")),
        ({}, [1, 1, 1, EOS], Emitted(3, "aaa", "length", None)),
        ({"ignore_eos": True}, [1, EOS, 1, 1], Emitted(3, "aa", "length", None)),
        ({"stop": "ab"}, [1, 1, 1, 2], Emitted(3, "aaa", "length", None)),
    ],
)
def test_a_stop_at_the_cap_is_a_stop(
    options: dict[str, Any], block: list[int], expected: Emitted
) -> None:
    assert checker(max_tokens=3, **options).add(block) == expected
    assert checker(limit=3, **options).add(block) == expected


def test_a_stop_token_id_holds_under_ignore_eos_and_names_itself() -> None:
    stops = checker(ignore_eos=True, stop_token_ids=[EOS])
    assert stops.add([1, EOS, 1]) == Emitted(2, "a", "stop", EOS)


def test_a_stop_string_spanning_tokens_and_steps() -> None:
    stops = checker(stop=["abca"])
    assert stops.add([7, 1]) == Emitted(2, " ", None, None)
    assert stops.pending == "a"
    assert stops.add([2]) == Emitted(1, "", None, None)
    assert stops.add([3]) == Emitted(1, "", None, None)
    assert stops.pending == "abc"
    assert stops.add([4, 1, 1]) == Emitted(1, "", "stop", "abca")
    assert stops.text == " " and stops.token_ids == [7, 1, 2, 3, 4]


def test_held_back_text_comes_when_the_stop_string_does_not() -> None:
    stops = checker(stop=["abca"], max_tokens=5)
    assert stops.add([6]).text == ""
    assert stops.add([2]).text == "abcb"
    assert stops.add([4, 1, 1]) == Emitted(3, "abaa", "length", None)
    assert stops.pending == ""


def test_a_stop_string_inside_a_token_cuts_the_token() -> None:
    stops = checker(stop=["b"])
    assert stops.add([7, 6, 1]) == Emitted(2, " a", "stop", "b")
    assert stops.token_ids == [7, 6]


def test_the_first_to_be_complete_wins_and_the_longer_of_two() -> None:
    assert checker(stop=["bc", "ab"]).add([7, 6]) == Emitted(2, " ", "stop", "ab")
    assert checker(stop=["c", "abc"]).add([7, 6]) == Emitted(2, " ", "stop", "abc")


def test_stops_may_be_left_in_the_text() -> None:
    options: dict[str, Any] = {"include_stop_str_in_output": True}
    assert checker(stop="b", **options).add([7, 6]) == Emitted(2, " ab", "stop", "b")
    assert checker(stop_token_ids=[3], **options).add([1, 3]) == Emitted(2, "ac", "stop", 3)
    # Nothing is held back: whatever comes, it is part of the text.
    assert checker(stop="ab", **options).add([1]).text == "a"


def test_a_broken_character_is_held_back_until_the_end() -> None:
    stops = checker(max_tokens=3)
    assert stops.add([1, 9]).text == "a"
    assert stops.add([9]) == Emitted(1, "\ufffd\ufffd", "length", None)


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=20),
    st.lists(st.text("abc ", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 5), min_size=20, max_size=20),
    st.booleans(),
)
def test_blocks_of_any_size_end_where_single_characters_would(
    ids: list[int], stop: list[str], widths: list[int], include: bool
) -> None:
    stops = checker(stop=stop, max_tokens=15, include_stop_str_in_output=include)
    streamed, taken = "", 0
    for width in widths:
        step = stops.add(ids[taken : taken + width])
        streamed += step.text
        taken += step.kept
        if not include and stops.finish_reason is None:
            assert not any(s in streamed for s in stop)
        if step.finish_reason:
            break
    text, ends, count = "", None, 0
    for token in ids[:15]:
        count += 1
        for character in Pieces.texts[token]:
            text += character
            complete = [s for s in stop if text.endswith(s)]
            if complete:
                ends = max(complete, key=len)
                text = text if include else text[: -len(ends)]
                break
        if ends:
            break
    assert (stops.stop_reason, stops.text, taken) == (ends, text, count)
    assert stops.finish_reason == ("stop" if ends else "length" if count == 15 else None)
    assert streamed + stops.pending == text
    assert not (stops.pending and stops.finish_reason)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=20),
    st.lists(st.text("abc ", min_size=1, max_size=4), max_size=2),
    st.lists(st.integers(1, 5), min_size=20, max_size=20),
    st.booleans(),
    st.booleans(),
)
def test_text_asked_for_at_the_end_is_the_text_that_was_streamed(
    ids: list[int], stop: list[str], widths: list[int], include: bool, ignore_eos: bool
) -> None:
    options: dict[str, Any] = {"stop": stop, "include_stop_str_in_output": include}
    options |= {"max_tokens": 15, "ignore_eos": ignore_eos}
    streaming, waiting = checker(**options), checker(**options)
    streamed, taken = "", 0
    for width in widths:
        step = streaming.add(ids[taken : taken + width])
        streamed += step.text
        assert waiting.take(ids[taken : taken + width]) == step.kept
        assert waiting.finish_reason == step.finish_reason
        assert waiting.stop_reason == step.stop_reason
        taken += width
    assert waiting.token_ids == streaming.token_ids
    assert waiting.text == streaming.text == streamed + streaming.pending
    assert waiting.text == streaming.text  # asked for again, nothing is added
