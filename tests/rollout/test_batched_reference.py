"""The batched oracle is the plain one, block by block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knockon.rollout import DominoHead
from knockon.rollout.batched_reference import BatchedReference, input_gates
from knockon.rollout.reference import base_logits, reference_rollout
from tests.rollout.exact_cases import DTYPES, drawn_case


@settings(max_examples=150)
@given(data=st.data())
def test_exact_cases_with_ties_infinities_and_nan(data: st.DataObject) -> None:
    vocab_size = data.draw(st.integers(1, 40), "V")
    case = drawn_case(data, vocab_size)
    pool_size = data.draw(st.integers(0, vocab_size + 2), "K")
    gates = input_gates(case.head, case.embedding, case.head.dtype)
    offset = 0 if case.head.shift_label else 1
    z = case.draft_hidden[:, offset : offset + case.steps]
    reading = BatchedReference(case.head, gates).read(z, case.bonus, case.base, pool_size)
    assert reading.tokens.tolist() == case.oracle(pool_size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pool_size", (0, 60))
def test_random_weights_with_the_roundings_of_each_dtype(
    dtype: torch.dtype, pool_size: int
) -> None:
    rng = torch.Generator().manual_seed(pool_size)
    vocab_size, hidden, width, narrow, steps = 301, 24, 12, 8, 7

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=rng, dtype=torch.float64)).to(dtype)

    head = DominoHead(
        normal(3 * width, hidden, scale=0.4),
        normal(3 * width, width),
        normal(narrow, hidden + width),
        normal(vocab_size, narrow),
    )
    embedding, lm_head = normal(vocab_size, hidden), normal(vocab_size, hidden)
    hidden_rows = normal(6, steps + 1, hidden)
    bonus = torch.randint(0, vocab_size, (6,), generator=rng)
    wanted = reference_rollout(head, embedding, lm_head, hidden_rows, bonus, steps, pool_size)
    z = hidden_rows[:, 1:]
    reference = BatchedReference(head, input_gates(head, embedding, dtype))
    base = base_logits(lm_head, z)
    reading = reference.read(z, bonus, base, pool_size)
    assert torch.equal(reading.tokens, wanted)
    # The lead is what the sums of a row, made anew from the chain before it, say.
    row = 4
    correction = reference.correction_after(z[:, row], bonus, wanted[:, :row])
    sums = base[:, row].double() + correction
    chosen = sums.gather(1, wanted[:, row : row + 1]).squeeze(1)
    if pool_size == 0:
        best = sums.topk(2).values
        torch.testing.assert_close(chosen, best[:, 0])
        torch.testing.assert_close(reading.leads[:, row], best[:, 0] - best[:, 1])
    assert (reading.leads[:, row] >= 0).all()
