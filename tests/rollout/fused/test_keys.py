"""Keys order as logits do."""

from __future__ import annotations

import math

import pytest
import torch

from knockon.errors import Refused
from knockon.rollout.fused.keys import SENTINEL, key_dtype, keys_of, padding_key
from knockon.rollout.reference import rank_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_compare_as_the_specification_orders(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    values = [math.nan, -math.nan, -math.inf, math.inf, -0.0, 0.0, 1.0, -1.0, 2.0, 0.5]
    values += [info.min, info.max, info.tiny, -info.tiny, info.tiny / 4, -info.tiny / 4]
    logits = torch.tensor(values, dtype=torch.float64).to(dtype)
    keys = keys_of(logits).tolist()
    ranks = [rank_of(x) for x in logits.tolist()]
    assert min(keys) > padding_key(dtype) >= SENTINEL
    for key, rank in zip(keys, ranks, strict=True):
        for other_key, other_rank in zip(keys, ranks, strict=True):
            assert (key < other_key) == (rank < other_rank)
            assert (key == other_key) == (rank == other_rank)


def test_every_16_bit_pattern_has_the_key_of_its_value() -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        logits = bits.view(dtype)
        numbers = logits[~logits.isnan()].double() + 0.0
        keys = keys_of(logits)[~logits.isnan()]
        order = numbers.argsort(stable=True)
        step = numbers[order].diff().sign()
        assert torch.equal(step, keys[order].diff().sign().double())


def test_fp64_has_no_keys() -> None:
    with pytest.raises(Refused, match="logits dtype"):
        key_dtype(torch.float64)
