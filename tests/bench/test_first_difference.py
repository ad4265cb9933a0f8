"""Each cause of a first difference is told from the others, in blocks made by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from knockon.bench.first_difference import (
    BASE,
    BOTH,
    GATES,
    SUMS,
    UNEXPLAINED,
    FirstDifference,
    Reading,
    explain,
)
from knockon.rollout import DominoHead
from knockon.rollout.batched_reference import BatchedReference

# One GRU unit that follows its input gate, and a correction of that state for id 2 alone.
HEAD = DominoHead(
    gru_input=torch.zeros(3, 1, dtype=torch.float64),
    gru_state=torch.zeros(3, 1, dtype=torch.float64),
    correction_in=torch.tensor([[0.0, 100.0]], dtype=torch.float64),
    correction_out=torch.tensor([[0.0], [0.0], [1.0], [0.0]], dtype=torch.float64),
)
BASE_LOGITS = [[9.0, 0.0, 0.0, 0.0], [1.0, 4.0, 3.9, 2.0]]


def reading(base: list[list[float]], state_after_token_0: float = 0.0) -> Reading:
    gates = torch.zeros(4, 3, dtype=torch.float64)
    gates[0] = torch.tensor([0.0, -50.0, state_after_token_0])  # the update gate shut
    return Reading(BatchedReference(HEAD, gates), torch.tensor(base, dtype=torch.float64))


def difference(
    found: int, rolled: Reading, read: Reading | None = None, pool_size: int = 0
) -> FirstDifference:
    read = read or reading(BASE_LOGITS)
    rows, bonus = torch.zeros(2, 1, dtype=torch.float64), torch.tensor(3)
    wanted = read.reference.read(
        rows.unsqueeze(0), bonus.view(1), read.base.unsqueeze(0), pool_size
    ).tokens[0]
    chain: Tensor = torch.tensor([0, found])
    assert wanted[0] == 0
    return explain(5, rows, bonus, wanted, chain, read, rolled, torch.bfloat16, pool_size)


def test_a_base_logit_rounded_up() -> None:
    found = difference(2, reading([BASE_LOGITS[0], [1.0, 4.0, 4.1, 2.0]]))
    assert (found.block, found.row, found.wanted, found.found) == (5, 1, 1, 2)
    assert found.cause == BASE
    assert not found.at_cutoff
    assert abs(found.margin - 0.1) < 1e-9
    assert abs(found.moved - 0.2) < 1e-9
    assert found.spacing == 2**-5  # of BF16 from 4 to 8


def test_a_prefix_row_hangs_on_base_logits_alone() -> None:
    read = reading([[9.0, 8.99, 0.0, 0.0], BASE_LOGITS[1]])
    rolled = reading([[9.0, 9.0, 0.0, 0.0], BASE_LOGITS[1]])
    rows, bonus = torch.zeros(2, 1, dtype=torch.float64), torch.tensor(3)
    wanted, chain = torch.tensor([0, 1]), torch.tensor([1, 1])
    found = explain(0, rows, bonus, wanted, chain, read, rolled, torch.bfloat16, 0)
    assert found.cause == UNEXPLAINED  # a tie goes to the lower id
    rolled.base[0, 1] += 0.05
    found = explain(0, rows, bonus, wanted, chain, read, rolled, torch.bfloat16, 0)
    assert (found.row, found.cause) == (0, BASE)


def test_a_gate_rounded_up_and_both_together() -> None:
    moved = reading(BASE_LOGITS, 0.002)  # SiLU(0.2) is 0.11, what id 2 lacks
    assert difference(2, moved).cause == GATES
    each_too_little = reading([BASE_LOGITS[0], [1.0, 4.0, 3.95, 2.0]], 0.0015)
    assert difference(2, each_too_little).cause == BOTH


def test_the_pools_cutoff() -> None:
    read = reading([BASE_LOGITS[0], [1.0, 4.0, 3.9, 3.88]], 0.04)
    rolled = reading([BASE_LOGITS[0], [1.0, 4.0, 3.85, 3.88]], 0.04)
    found = difference(1, rolled, read, pool_size=2)  # id 2, which was corrected, fell out
    assert (found.wanted, found.found, found.at_cutoff, found.cause) == (2, 1, True, BASE)
    assert abs(found.margin - 0.02) < 1e-9
    assert abs(found.moved - 0.05) < 1e-9


def test_what_only_the_sums_can_have_done_and_what_nothing_did() -> None:
    near = reading([BASE_LOGITS[0], [1.0, 4.0, 4.0 - 1e-6, 2.0]])
    assert difference(2, near, near).cause == SUMS
    assert difference(3, reading(BASE_LOGITS)).cause == UNEXPLAINED
    assert difference(2, reading(BASE_LOGITS)).cause == UNEXPLAINED
