"""A row of a verified block rounds alike, bit for bit, at every verify width."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from knockon.layers.attention import Visibility
from knockon.layers.attention.paged import PagedBackend
from tests.layers.attention.test_paged import (
    BF16,
    CAUSAL,
    FP16,
    FP32,
    SEEING,
    Case,
    Inputs,
    make_inputs,
)


def first_row_of(inputs: Inputs, width: int, visibility: Visibility) -> Tensor:
    """What the first row of a block of ``width`` rows attends to, launched as a runner would."""
    plan = inputs.plan
    plan = replace(plan, positions=plan.positions[:, :width].contiguous(), segments=())
    return PagedBackend().attend(inputs.q[:, :width], inputs.kv, plan, visibility)[:, 0]


@pytest.mark.parametrize("seeing", ["causal", "window over blocks", "from within a block"])
def test_a_row_rounds_alike_at_every_width(seeing: str, kernel_device: torch.device) -> None:
    """Wider blocks see further: into another block of keys, and so into another part."""
    case = Case((30, 62, 17), 6)
    inputs = make_inputs(case, FP32, kernel_device)
    PagedBackend().write(inputs.k, inputs.v, inputs.kv, inputs.plan)
    rows = [first_row_of(inputs, w, SEEING[seeing]) for w in (1, 2, 3, 6)]
    assert all(torch.equal(row, rows[0]) for row in rows)


WIDE = {
    "8B, one block": Case((760,), 16, heads=32, kv_heads=8, dim=128, page_size=16),
    "8B, at a block's edge": Case((752, 757, 1023, 5), 16, heads=32, kv_heads=8, dim=128),
    "SmolLM2": Case((77, 300, 126), 16, 9, 3, 64),
    "large heads": Case((77, 300), 16, 8, 2, 256, 16),
    "large groups": Case((77, 300), 16, 32, 2, 128, 16),
    "odd heads": Case((77, 300), 16, 10, 2, 80, 16),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_served_rows_round_alike_at_every_width(name: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(WIDE[name], dtype, torch.device("cuda"))
    PagedBackend().write(inputs.k, inputs.v, inputs.kv, inputs.plan)
    rows = [first_row_of(inputs, width, CAUSAL) for width in (1, 2, 4, 5, 8, 12, 16)]
    assert all(torch.equal(row, rows[0]) for row in rows)
