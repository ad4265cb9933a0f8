"""Sequences are kept narrow, taken in parts, and held out with their prompts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from knockon.train.sequences import BatchOrder, PackedSequences

PAIRS = [([1, 2], [3, 4, 5]), ([1, 2], [9]), ([7], [8, 65535]), ([1], [2, 3]), ([6, 6, 6], [1])]


def test_parts_and_pairs_are_those_that_were_packed() -> None:
    packed = PackedSequences.pack(PAIRS)
    assert packed.pairs() == PAIRS
    assert packed.part(np.array([3, 0])).pairs() == [PAIRS[3], PAIRS[0]]
    assert packed.part(np.array([], np.int64)).pairs() == []


@pytest.mark.parametrize(("highest", "kept"), [(65535, torch.uint16), (65536, torch.int32)])
def test_tokens_take_16_bits_where_they_fit(
    tmp_path: Path, highest: int, kept: torch.dtype
) -> None:
    file = tmp_path / "sequences.safetensors"
    PackedSequences.pack([*PAIRS, ([0], [highest])]).save(file)
    assert load_file(file)["tokens"].dtype == kept
    again = PackedSequences.load(file)
    assert again.tokens.dtype == torch.int32
    assert again.pairs()[-1] == ([0], [highest])


def test_a_held_out_prompt_is_nowhere_in_the_rest() -> None:
    pairs = [([3, prompt], [4, answer]) for prompt in range(40) for answer in range(3)]
    rest, held_out = PackedSequences.pack(pairs).hold_out(6, seed=1)
    assert len(held_out) == 6
    assert not rest.prompts() & held_out.prompts()
    assert sorted(rest.pairs() + [p for p in pairs if tuple(p[0]) in held_out.prompts()]) == pairs
    again = PackedSequences.pack(pairs).hold_out(6, seed=1)[1]
    assert again.pairs() == held_out.pairs()


def test_tokens_of_a_batch_are_counted_without_padding() -> None:
    packed = PackedSequences.pack(PAIRS)
    order = BatchOrder(packed.lengths, 2, seed=0)
    numbers, width = order.batch(0)
    assert order.tokens(0) == int(packed.lengths[numbers].sum()) < 2 * width
