"""The table of input gates: the same bits on every rank, whole or sharded, in any chunks."""

from __future__ import annotations

import pytest
import torch

from knockon.parallel import SingleRank, VocabShard
from knockon.rollout import DominoHead
from knockon.rollout.gates import ComputedGates, TabulatedGates, tabulate
from knockon.rollout.layout import VocabLayout
from knockon.rollout.recurrence import Recurrence
from tests.rollout.thread_ranks import ThreadGroup, run_ranks

V, H, G, E = 37, 8, 6, 4


def random_head(dtype: torch.dtype) -> tuple[DominoHead, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    shapes = ((3 * G, H), (3 * G, G), (E, H + G), (V, E))
    head = DominoHead(*(torch.randn(s, generator=rng).to(dtype) for s in shapes))
    return head, torch.randn(V, H, generator=rng).to(dtype)


def layout(size: int) -> VocabLayout:
    return VocabLayout([VocabShard.deal(V, size, r) for r in range(size)], torch.device("cpu"))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64))
def test_the_table_is_the_product_rounded_to_the_weights_dtype(dtype: torch.dtype) -> None:
    head, embedding = random_head(dtype)
    wanted = (embedding.double() @ head.gru_input.double().t()).to(dtype)
    for size, chunk in ((1, 1000), (1, 5), (3, 1000), (3, 4), (8, 2)):

        def program(group: ThreadGroup, size: int = size, chunk: int = chunk) -> torch.Tensor:
            shard = VocabShard.deal(V, size, group.rank)
            own = embedding[shard.start : shard.stop]
            return tabulate(head, own, layout(size), group, chunk=chunk)

        for table in run_ranks(size, program):
            torch.testing.assert_close(table, wanted)


def test_an_embedding_wider_than_the_head_is_rounded_once_at_the_end() -> None:
    head, _ = random_head(torch.bfloat16)
    embedding = torch.randn(V, H, generator=torch.Generator().manual_seed(2))
    table = tabulate(head, embedding, layout(1), SingleRank())
    wanted = (embedding @ head.gru_input.float().t()).to(torch.bfloat16)
    torch.testing.assert_close(table, wanted)


def test_tabulated_and_computed_gates_agree_to_the_tables_rounding() -> None:
    head, embedding = random_head(torch.bfloat16)
    tokens = torch.tensor([0, 5, 36, 5])
    computed = ComputedGates(head, embedding)(tokens)
    table = TabulatedGates(tabulate(head, embedding, layout(1), SingleRank()), torch.float32)
    assert computed.dtype == table(tokens).dtype == torch.float32
    torch.testing.assert_close(table(tokens), computed, rtol=2**-8, atol=1e-6)


def test_the_recurrence_is_torchs_gru_cell() -> None:
    head, embedding = random_head(torch.float64)
    cell = torch.nn.GRUCell(H, G, bias=False, dtype=torch.float64)
    cell.weight_ih.data.copy_(head.gru_input)
    cell.weight_hh.data.copy_(head.gru_state)
    recurrence, gates = Recurrence(head), ComputedGates(head, embedding)
    state, state_gates = recurrence.zero_state(2)
    wanted = state
    for step in range(4):
        tokens = torch.tensor([step, step + 9])
        state = recurrence.cell(state, gates(tokens), state_gates)
        state_gates, _ = recurrence.from_state(state)
        wanted = cell(embedding[tokens], wanted)
        torch.testing.assert_close(state, wanted.detach(), rtol=1e-12, atol=1e-12)
