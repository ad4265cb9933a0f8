"""A block through the gated delta rule in one launch: the twin's numbers, and bits of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from knockon.layers import recurrent_state
from knockon.layers.delta_rule import DeltaInputs, delta_steps, replay
from knockon.layers.fused.delta_block import delta_block_kernel, replay_block_kernel
from knockon.layers.recurrent_state import DeltaMemory, HeldBlock, StateRows
from tests.layers.drawn_delta import draw_delta_inputs

SIZES = [(2, 3, 2, 4, 16, 24), (1, 1, 3, 3, 10, 40), (3, 4, 1, 2, 8, 8)]
KEPT = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def make(
    sizes: tuple[int, ...], kept: torch.dtype, device: torch.device
) -> tuple[DeltaInputs, Tensor, Tensor]:
    """Inputs, states of more slots than requests, and whose they are."""
    batch, rows, key_heads, value_heads, key, value = sizes
    rng = torch.Generator().manual_seed(sum(sizes))
    inputs = draw_delta_inputs(rng, batch, rows, (key_heads, value_heads, key, value))
    states = torch.randn(batch + 2, value_heads, key, value, generator=rng).to(kept)
    slots = torch.randperm(batch + 2, generator=rng)[:batch]
    return DeltaInputs(*(x.to(device) for x in inputs)), states.to(device), slots.to(device)


def check(sizes: tuple[int, ...], kept: torch.dtype, device: torch.device) -> None:
    inputs, states, slots = make(sizes, kept, device)
    near = {"rtol": 2e-2, "atol": 2e-2} if kept == torch.bfloat16 else {"rtol": 2e-5, "atol": 2e-5}
    wanted, wanted_corrections, last = delta_steps(inputs, states[slots].float(), kept)
    before = states.clone()
    out, corrections = delta_block_kernel(inputs, states, slots, write=False)
    assert torch.equal(states, before)
    torch.testing.assert_close(out, wanted, **near)
    torch.testing.assert_close(corrections, wanted_corrections, **near)
    again, _ = delta_block_kernel(inputs, states, slots, write=True)
    assert torch.equal(again, out)
    torch.testing.assert_close(states[slots].float(), last, **near)
    others = [s for s in range(len(states)) if s not in slots.tolist()]
    assert torch.equal(states[others], before[others])

    batch, rows = inputs.v.shape[:2]
    lengths = torch.arange(batch, device=device) % rows + 1
    replayed = before.clone()
    replay_block_kernel(replayed, slots, inputs.k, corrections, inputs.log_decay, lengths)
    twin = replay(before[slots].float(), inputs.k, corrections, inputs.log_decay, lengths, kept)
    torch.testing.assert_close(replayed[slots].float(), twin, **near)
    assert torch.equal(replayed[others], before[others])
    # Row by row, as decoding runs them: the block's outputs, and the replay's states, bit for bit.
    alone = before.clone()
    for t in range(rows):
        one = DeltaInputs(*(x[:, t : t + 1] for x in inputs))
        stepped = alone.clone()
        found, _ = delta_block_kernel(one, stepped, slots, write=True)
        assert torch.equal(found, out[:, t : t + 1])
        ends = slots[lengths == t + 1]
        assert torch.equal(stepped[ends], replayed[ends])
        alone = stepped


def test_lengths_and_slots_may_be_columns_of_something_wider(kernel_device: torch.device) -> None:
    """As accept lengths are where several ranks took one rank's word for them."""
    inputs, states, slots = make(SIZES[2], torch.float32, kernel_device)
    lengths = torch.arange(1, len(slots) + 1, device=kernel_device)
    wide = torch.full((len(slots), 6), 99, device=kernel_device)
    wide[:, 2], wide[:, 5] = slots, lengths
    found = []
    for whose, stand in ((slots, lengths), (wide[:, 2], wide[:, 5])):
        out, corrections = delta_block_kernel(inputs, states, whose, write=False)
        moved = states.clone()
        replay_block_kernel(moved, whose, inputs.k, corrections, inputs.log_decay, stand)
        found.append((out, moved))
    for plain, strided in zip(*found, strict=True):
        assert torch.equal(plain, strided)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("sizes", SIZES)
def test_kernels_equal_twins_and_rows_are_alike_in_any_block(
    sizes: tuple[int, ...], kept: torch.dtype, kernel_device: torch.device
) -> None:
    check(sizes, kept, kernel_device)


def test_a_layers_memory_is_moved_on_by_kernels_as_by_twins(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, states, slots = make(SIZES[0], torch.float32, kernel_device)
    batch, rows, _, heads, key, value = SIZES[0]
    mixed = torch.randn(batch, rows, 5, device=kernel_device)
    found = []
    for fused in (False, True):
        monkeypatch.setattr(recurrent_state, "fuses", lambda x, fused=fused: fused)
        memory = DeltaMemory(
            len(states), (heads, key, value), (3, 5), torch.float32, torch.float32, kernel_device
        )
        memory.state.copy_(states)
        starts = torch.full_like(slots, 9)
        memory.conv.copy_(torch.arange(memory.conv.numel()).view_as(memory.conv))
        where = StateRows(slots, held=True)
        conv = memory.conv_rows(where, starts, mixed)
        out, corrections = memory.step(where, starts, inputs)
        memory.hold(HeldBlock(inputs.k, corrections, inputs.log_decay, conv))
        memory.commit(torch.tensor([2, 3], device=kernel_device))
        one = DeltaInputs(*(x[:, :1] for x in inputs))
        last, _ = memory.step(StateRows(slots), starts, one)
        others = [slot for slot in range(len(states)) if slot not in slots.tolist()]
        memory.write_inputs(torch.tensor(others, device=kernel_device), conv, 1)
        found.append((out, last, memory.state, memory.conv))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("heads", [(16, 48), (8, 24), (16, 32)])
def test_kernels_equal_twins_at_models_sizes(
    heads: tuple[int, int], batch: int, kept: torch.dtype, kernel_device: torch.device
) -> None:
    check((batch, 16, *heads, 128, 128), kept, kernel_device)
