"""The gated delta rule by tokens, by chunks, and replayed up to a length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from knockon.layers.delta_rule import (
    DeltaInputs,
    chunks_and_kept,
    delta_chunks,
    delta_steps,
    replay,
    without_padding,
)
from knockon.layers.recurrent_state import DeltaMemory, HeldBlock, StateRows
from knockon.layers.short_conv import inputs_before, short_conv
from knockon.layers.whole_vectors import by_whole_vectors
from tests.layers.drawn_delta import draw_delta_inputs

BATCH, KEY_HEADS, VALUE_HEADS, KEY, VALUE = 3, 2, 4, 8, 6


def make_inputs(rows: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> DeltaInputs:
    rng = torch.Generator().manual_seed(seed)
    sizes = (KEY_HEADS, VALUE_HEADS, KEY, VALUE)
    found = draw_delta_inputs(rng, BATCH, rows, sizes, dtype=torch.float64)
    return DeltaInputs(*(x.to(dtype) for x in found))


def make_state(dtype: torch.dtype = torch.float64) -> Tensor:
    rng = torch.Generator().manual_seed(9)
    return torch.randn(BATCH, VALUE_HEADS, KEY, VALUE, generator=rng, dtype=dtype)


def head(inputs: DeltaInputs, rows: slice) -> DeltaInputs:
    return DeltaInputs(*(x[:, rows] for x in inputs))


def test_steps_are_the_rule_as_written() -> None:
    inputs, state = make_inputs(5), make_state()
    out, _, last = delta_steps(inputs, state.clone(), torch.float64)
    for b in range(BATCH):
        for h in range(VALUE_HEADS):
            s = state[b, h]
            for t in range(5):
                k, q = inputs.k[b, t, h // 2], inputs.q[b, t, h // 2]
                s = inputs.log_decay[b, t, h].exp() * s
                s = s + torch.outer(k, inputs.beta[b, t, h] * (inputs.v[b, t, h] - s.T @ k))
                torch.testing.assert_close(out[b, t, h], s.T @ q)
            torch.testing.assert_close(last[b, h], s)


@pytest.mark.parametrize("rows", [1, 5, 63, 64, 65, 150])
def test_chunks_equal_steps(rows: int) -> None:
    inputs, state = make_inputs(rows), make_state()
    held = state.clone()
    out, last = delta_chunks(inputs, state)
    assert torch.equal(state, held)
    steps, _, stepped = delta_steps(inputs, state, torch.float64)
    torch.testing.assert_close(out, steps)
    torch.testing.assert_close(last, stepped)


def test_chunks_stay_finite_where_everything_is_forgotten() -> None:
    inputs = make_inputs(130, torch.float32)._replace(
        log_decay=torch.full((BATCH, 130, VALUE_HEADS), -90.0)
    )
    out, last = delta_chunks(inputs, make_state(torch.float32))
    steps, _, _ = delta_steps(inputs, make_state(torch.float32), torch.float32)
    assert out.isfinite().all() and last.isfinite().all()
    torch.testing.assert_close(out, steps)


def test_rows_of_padding_leave_states_as_they_are() -> None:
    counts = torch.tensor([70, 3, 1])
    inputs, state = make_inputs(70), make_state()
    out, last = delta_chunks(without_padding(inputs, counts), state)
    for row, count in enumerate(counts.tolist()):
        alone = DeltaInputs(*(x[[row], :count] for x in inputs))
        wanted, stepped = delta_chunks(alone, state[[row]])
        torch.testing.assert_close(out[[row], :count], wanted)
        torch.testing.assert_close(last[[row]], stepped)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_a_replay_leaves_the_bits_that_the_rows_alone_would_have(kept: torch.dtype) -> None:
    inputs = make_inputs(9, torch.float32)
    state = make_state(torch.float32).to(kept).float()
    out, corrections, _ = delta_steps(inputs, state.clone(), kept)
    for lengths in ([1, 4, 9], [2, 2, 2]):
        replayed = replay(
            state.clone(),
            inputs.k,
            corrections,
            inputs.log_decay,
            torch.tensor(lengths),
            kept,
        )
        for row, length in enumerate(lengths):
            alone = state.clone()
            for t in range(length):  # one forward a token, each rounding what it keeps
                one, _, alone = delta_steps(head(inputs, slice(t, t + 1)), alone, kept)
                assert torch.equal(one[row], out[row, t : t + 1])
                alone = alone.to(kept).float()
            assert torch.equal(replayed[row], alone[row])


def test_memory_keeps_states_until_a_block_is_committed_and_other_slots_always() -> None:
    rows, taps = 5, 3
    memory = DeltaMemory(6, (VALUE_HEADS, KEY, VALUE), (taps - 1, 7), torch.float32, torch.bfloat16)
    memory.state.normal_()
    memory.conv.normal_()
    before = memory.state.clone(), memory.conv.clone()
    where = StateRows(torch.tensor([4, 1, 3]), held=True)
    starts = torch.tensor([8, 8, 8])
    inputs = make_inputs(rows, torch.float32)
    conv = memory.conv_rows(where, starts, torch.randn(BATCH, rows, 7).bfloat16())
    conv_rows = conv.joined()
    _, corrections = memory.step(where, starts, inputs)
    memory.hold(HeldBlock(inputs.k, corrections, inputs.log_decay, conv))
    assert torch.equal(memory.state, before[0]) and torch.equal(memory.conv, before[1])
    memory.commit(torch.tensor([2, 5, 1]))
    for row, (slot, length) in enumerate([(4, 2), (1, 5), (3, 1)]):
        alone = before[0][where.slots].clone()
        _, _, alone = delta_steps(head(inputs, slice(0, length)), alone, torch.float32)
        assert torch.equal(memory.state[slot], alone[row])
        assert torch.equal(memory.conv[slot], conv_rows[row, length : length + taps - 1])
    for slot in (0, 2, 5):
        assert torch.equal(memory.state[slot], before[0][slot])
    with pytest.raises(ValueError, match="no block is held"):
        memory.commit(torch.tensor([1, 1, 1]))


def test_a_request_begins_with_nothing_whoever_had_its_slot() -> None:
    memory = DeltaMemory(3, (2, 4, 4), (3, 5), torch.bfloat16, torch.float32)
    memory.state.fill_(torch.nan)
    memory.conv.fill_(torch.nan)
    memory.state[2] = 7
    memory.conv[2] = 7
    where = StateRows(torch.tensor([1, 2]), may_begin=True)
    starts = torch.tensor([0, 4])
    state = memory.states_before(where, starts, torch.float32)
    conv = memory.conv_rows(where, starts, torch.ones(2, 1, 5)).joined()
    assert state.dtype == torch.float32
    assert not state[0].any() and not conv[0, :3].any()
    assert (state[1] == 7).all() and (conv[1, :3] == 7).all()
    assert (conv[:, 3] == 1).all()
    memory.copy(2, 0)
    assert (memory.state[0] == 7).all() and (memory.conv[0] == 7).all()


def test_the_convolution_is_causal_and_a_row_is_alike_in_any_number() -> None:
    rows, weight = torch.randn(2, 3 + 9, 70), torch.randn(4, 70)
    found = short_conv(rows, weight)
    padded = torch.nn.functional.conv1d(
        rows.transpose(1, 2), weight.t().unsqueeze(1), groups=70
    ).transpose(1, 2)
    torch.testing.assert_close(found, torch.nn.functional.silu(padded))
    wide = torch.randn(1, 3 + 9, 128)
    taps = torch.randn(4, 128)
    for t in range(9):
        one = short_conv(wide[:, t : t + 4], taps)
        assert torch.equal(one, short_conv(wide, taps)[:, t : t + 1])


@pytest.mark.parametrize("counts", [[1, 64, 70], [0, 20, 129], [37], [20, 20]])
def test_states_left_aside_on_the_way_are_those_of_the_rows_so_far(counts: list[int]) -> None:
    requests = slice(len(counts))
    inputs, state = make_inputs(130), make_state()[requests]
    inputs = DeltaInputs(*(x[requests] for x in inputs))
    held = state.clone()
    cut = counts[0] if len(set(counts)) == 1 else None
    out, last, kept = chunks_and_kept(delta_chunks, inputs, state, torch.tensor(counts), cut)
    assert torch.equal(state, held)
    wanted, wanted_last = delta_chunks(inputs, state)
    if cut is None:
        assert torch.equal(out, wanted) and torch.equal(last, wanted_last)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(last, wanted_last)
    for row, count in enumerate(counts):
        alone = DeltaInputs(*(x[[row], :count] for x in inputs))
        _, _, expected = delta_steps(alone, state[[row]].clone(), torch.float64)
        torch.testing.assert_close(kept[[row]], expected)


def test_inputs_before_the_next_row() -> None:
    rows = torch.arange(2 * 7 * 1.0).view(2, 7, 1)
    assert inputs_before(rows, 4, 4)[0, :, 0].tolist() == [4, 5, 6]
    assert inputs_before(rows, torch.tensor([1, 4]), 4)[..., 0].tolist() == [
        [1, 2, 3],
        [11, 12, 13],
    ]


def test_elementwise_functions_are_alike_for_a_row_and_a_block() -> None:
    x = torch.randn(16, 12)
    for function in (torch.exp, torch.sigmoid, torch.nn.functional.softplus):
        block = by_whole_vectors(function, x)
        torch.testing.assert_close(block, function(x))
        rows = [by_whole_vectors(function, row) for row in x.split(1)]
        assert torch.equal(torch.cat(rows), block)


def test_a_replay_of_no_requests_is_none() -> None:
    k, corrections = torch.randn(0, 4, 2, 8), torch.randn(0, 4, 4, 6)
    lengths = torch.zeros(0, dtype=torch.int64)
    found = replay(torch.randn(0, 4, 8, 6), k, corrections, torch.randn(0, 4, 4), lengths, k.dtype)
    assert found.shape == (0, 4, 8, 6)
