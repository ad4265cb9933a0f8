"""Incremental decoding: the pieces join to the whole decoding, no broken character in between."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from knockon.engine.detokenizer import Detokenizer

# A byte-level BPE without merges has one token a byte: the hardest case. A few merges and a
# special token are added, one of the merges ending inside a character.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "ð")]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate([*ALPHABET, *("".join(m) for m in MERGES)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id


def whole(ids: list[int]) -> str:
    text = TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def pieces(ids: list[int], cuts: list[int]) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER)
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    out = [detokenizer.add(ids[a:b]) for a, b in pairwise(edges)]
    return [*out, detokenizer.flush()]


@given(st.text(max_size=40), st.lists(st.integers(0, 1000), max_size=60))
def test_pieces_of_text_join_and_are_whole_characters(text: str, cuts: list[int]) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    out = pieces(ids, cuts)
    assert "".join(out) == whole(ids) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in out)


@given(st.lists(st.integers(0, EOS), max_size=60), st.lists(st.integers(0, 1000), max_size=60))
def test_pieces_of_any_ids_join(ids: list[int], cuts: list[int]) -> None:
    assert "".join(pieces(ids, cuts)) == whole(ids)


@given(st.lists(st.integers(0, EOS), max_size=60), st.integers(0, 60))
def test_the_rest_may_come_at_the_end_at_once(ids: list[int], cut: int) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.add(ids[:cut]) + detokenizer.flush(ids[cut:]) == whole(ids)


def test_a_character_comes_with_its_last_byte() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    ids = TOKENIZER.encode("é🙂", add_special_tokens=False)
    assert [detokenizer.add([i]) for i in ids] == ["", "é", "", "", "", "🙂"]
    assert detokenizer.flush() == ""


def test_text_before_a_broken_character_is_not_held_back() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    ids = TOKENIZER.encode("xa🙂", add_special_tokens=False)
    assert len(ids) == 5  # "x", "a" with the first byte, three bytes
    assert [detokenizer.add([i]) for i in ids] == ["x", "a", "", "", "🙂"]


@pytest.mark.parametrize("kind", ["text", "special", "broken"])
def test_the_work_does_not_grow_with_the_output(kind: str) -> None:
    class Counting:
        longest = 0

        def decode(self, token_ids: list[int], **options: bool) -> str:
            self.longest = max(self.longest, len(token_ids))
            return str(TOKENIZER.decode(token_ids, **options))

    counting = Counting()
    detokenizer = Detokenizer(counting)
    broken = ALPHABET.index("ð")
    for i in range(500):
        detokenizer.add([{"text": i % 94, "special": EOS, "broken": broken}[kind]])
    assert counting.longest <= 130
