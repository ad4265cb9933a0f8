"""A gated delta net layer with its kernels does to outputs and memory what it does without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from knockon.layers import recurrent_state
from knockon.layers.attention import plan_block
from knockon.layers.fused import delta_inputs, gated_norm
from knockon.layers.recurrent_state import Kept, StateRows
from knockon.models.gated_delta_net import GatedDeltaNet
from knockon.models.qwen3_5_config import DeltaConfig
from knockon.parallel import SingleRank

HIDDEN, SLOTS = 24, 9
CONFIG = DeltaConfig(2, 4, 8, 12, 4, (True,))


def make(device: torch.device) -> GatedDeltaNet:
    layer = GatedDeltaNet(CONFIG, HIDDEN, 1e-6, torch.float32, SingleRank()).to(device)
    rng = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        drawn = torch.randn(parameter.shape, generator=rng) * parameter.shape[-1] ** -0.5
        parameter.copy_(drawn)
    layer.rate.copy_(-layer.rate.abs())
    return layer


def prompts_blocks_and_rows(layer: GatedDeltaNet, device: torch.device) -> list[Tensor]:
    """Prompts that begin and go on, padded, with states left aside; a block; rows alone."""
    memory = layer.allocate(SLOTS, torch.float32, device)
    memory.state.fill_(3)  # whoever had the slots before
    memory.conv.fill_(3)
    table = torch.zeros(3, 16, dtype=torch.int32, device=device)
    # Columns of one tensor, as a prefill has them: slots, starts, counts, slots and rows aside.
    first = torch.tensor([[4, 0, 7, 5, 2], [2, 0, 2, 6, 1], [7, 0, 5, 1, 4]], device=device)
    second = torch.tensor([[4, 7, 1, 0, 1], [2, 2, 4, 3, 1], [7, 0, 3, 8, 2]], device=device)
    rng = torch.Generator().manual_seed(4)
    found = []

    def run(rows: int, starts: Tensor, states: StateRows) -> None:
        normed = torch.randn(3, rows, HIDDEN, generator=rng).to(device)
        out = layer(normed, memory, plan_block(table, 4, starts, rows, states=states))
        if states.counts is not None:
            padding = torch.arange(rows, device=device) >= states.counts.unsqueeze(1)
            out.masked_fill_(padding.unsqueeze(-1), 0)
        found.append(out)

    def take_note() -> None:
        found.extend([memory.state.clone(), memory.conv.clone()])

    for where in (first, second):
        slots, starts, counts, aside, kept = where.unbind(1)
        run(7, starts, StateRows(slots, False, True, counts, Kept(aside, kept)))
        take_note()
    slots, length = first[:, 0], torch.tensor([8, 6, 3], device=device)
    run(5, length, StateRows(slots, kept=Kept(first[:, 3], torch.full_like(slots, 2), 2)))
    take_note()
    slots = slots.contiguous()
    run(6, length + 5, StateRows(slots, held=True))
    take_note()
    memory.commit(torch.tensor([1, 6, 2], device=device))
    take_note()
    run(1, length + 8, StateRows(slots))
    take_note()
    return found


def both_ways(
    program: Callable[[], list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> list[list[Tensor]]:
    found = []
    for fused in (False, True):
        for module in (recurrent_state, delta_inputs, gated_norm):
            monkeypatch.setattr(module, "fuses", lambda x, fused=fused: fused)
        found.append(program())
    return found


def test_outputs_and_memory_are_those_of_the_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the kernels need Triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.inference_mode():
        layer = make(device)
        ways = both_ways(lambda: prompts_blocks_and_rows(layer, device), monkeypatch)
    for plain, kernels in zip(*ways, strict=True):
        torch.testing.assert_close(kernels, plain, rtol=2e-5, atol=2e-5)


@pytest.mark.gpu
def test_a_graph_of_a_block_and_its_commit_does_what_the_calls_do() -> None:
    """What a block holds lies untouched until it is committed, however often a graph is run."""
    device = torch.device("cuda")
    with torch.inference_mode():
        layer = make(device)
        memory = layer.allocate(SLOTS, torch.float32, device)
        memory.state.normal_()
        memory.conv.normal_()
        before = memory.state.clone(), memory.conv.clone()
        table = torch.zeros(3, 16, dtype=torch.int32, device=device)
        slots, lengths = torch.tensor([[6, 2, 3], [9, 7, 8]], device=device)
        stand = torch.ones_like(lengths)
        normed = torch.randn(3, 6, HIDDEN, device=device)

        def step() -> Tensor:
            plan = plan_block(table, 4, lengths, 6, states=StateRows(slots, held=True))
            out = layer(normed, memory, plan)
            _ = torch.full((1 << 20,), torch.nan, device=device)  # memory that was given back
            memory.commit(stand)
            return out

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        for how in ("calls", "graph"):
            memory.state.copy_(before[0])
            memory.conv.copy_(before[1])
            found = []
            for turn in range(4):
                rng = torch.Generator().manual_seed(turn)
                normed.copy_(torch.randn(normed.shape, generator=rng))
                stand.copy_(torch.tensor([1 + turn, 6 - turn, 3]))
                if how == "graph":
                    graph.replay()
                found.append((out if how == "graph" else step()).clone())
            if how == "calls":
                wanted = [*found, memory.state.clone(), memory.conv.clone()]
        for ours, theirs in zip([*found, memory.state, memory.conv], wanted, strict=True):
            assert torch.equal(ours, theirs)
