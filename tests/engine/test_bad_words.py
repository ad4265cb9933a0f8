"""Bad words, row by row and request by request, against a slow reference."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from knockon.engine.bad_words import BadWords, bad_word_tokens

V = 4
CPU = torch.device("cpu")
SEQUENCES = st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=4), max_size=3)
OUTPUTS = st.lists(st.integers(0, V - 1), max_size=6)


def reference(sequences: list[list[int]], context: list[int]) -> set[int]:
    return {
        ids[-1]
        for ids in sequences
        if len(context) >= len(ids) - 1 and context[len(context) - len(ids) + 1 :] == ids[:-1]
    }


@given(
    st.lists(st.tuples(SEQUENCES, OUTPUTS), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 10**6),
)
def test_row_i_bans_what_would_complete_a_sequence(
    requests: list[tuple[list[list[int]], list[int]]], width: int, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    sequences, outputs = (list(column) for column in zip(*requests, strict=True))
    bad_words = BadWords.build(sequences, outputs, V, CPU)
    if bad_words is None:
        assert not any(sequences)
        return
    for _ in range(2):
        proposals = torch.randint(0, V, (len(requests), width - 1), generator=g)
        logits = torch.zeros(len(requests), width, V)
        bad_words.apply_(logits, proposals)
        for b in range(len(requests)):
            for i in range(width):
                context = outputs[b] + proposals[b, :i].tolist()
                banned = set((logits[b, i] == -torch.inf).nonzero()[:, 0].tolist())
                assert banned == reference(sequences[b], context)
        assert ((logits == 0) | (logits == -torch.inf)).all()
        kept = torch.randint(1, width + 1, (len(requests),), generator=g)
        emitted = torch.randint(0, V, (len(requests), width), generator=g)
        bad_words.record(emitted, kept)
        outputs = [out + emitted[b, : kept[b]].tolist() for b, out in enumerate(outputs)]


def test_the_second_requests_bad_words_leave_its_neighbours_alone() -> None:
    bad_words = BadWords.build([[], [[1, 2]], []], [[1], [1], [1]], V, CPU)
    assert bad_words is not None
    logits = torch.zeros(3, 2, V)
    bad_words.apply_(logits, torch.tensor([[1], [1], [1]]))
    assert (logits[1, :, 2] == -torch.inf).all()
    assert (logits == -torch.inf).sum() == 2


def test_sequences_that_no_model_can_generate_are_left_out() -> None:
    assert BadWords.build([[[V], [1, V + 3]]], [[]], V, CPU) is None


WORDS = {"cat": [1], " cat": [2], "xy": [3, 4], " xy": [5], "q": [6], " q": [7, 6], "\n": [8]}


class Words:
    """A tokenizer of whole words: with and without a space before them, in pieces if unknown."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return WORDS[text]


def test_words_are_banned_at_a_texts_start_and_after_a_space() -> None:
    sequences = bad_word_tokens(Words(), ["cat", " cat", "xy", "q", "\n"])
    assert sequences == ((1,), (2,), (3, 4), (5,), (6,), (8,))
