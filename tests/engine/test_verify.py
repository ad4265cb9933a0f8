"""Acceptance: the longest agreeing prefix, then the target's own token."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from knockon.engine.speculate import agree
from knockon.engine.verify import accept


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 10**6))
def test_equals_the_loop(width: int, batch: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    proposals = torch.randint(0, 2, (batch, width - 1), generator=g)
    drawn = torch.randint(0, 2, (batch, width), generator=g)
    result = accept(proposals, drawn)
    for b in range(batch):
        emitted = []
        for i in range(width):
            emitted.append(drawn[b, i].item())
            if i == width - 1 or proposals[b, i] != drawn[b, i]:
                break
        assert result.lengths[b] == len(emitted)
        assert result.bonus[b] == emitted[-1]
        assert result.tokens[b].tolist() == emitted + [-1] * (width - len(emitted))


def test_later_agreement_does_not_count_and_negative_proposals_are_refused() -> None:
    result = accept(torch.tensor([[9, 2, 3], [-1, -1, -1]]), torch.tensor([[1, 2, 3, 4]] * 2))
    assert result.lengths.tolist() == [1, 1] and result.bonus.tolist() == [1, 1]


def test_width_one_is_the_drawn_token() -> None:
    result = accept(torch.empty(2, 0, dtype=torch.int64), torch.tensor([[7], [8]]))
    assert result.tokens.tolist() == [[7], [8]] and result.lengths.tolist() == [1, 1]


class Together:
    """Two ranks that have decided alike."""

    size = 2

    def broadcast(self, values: torch.Tensor) -> None:
        self.sent = values.clone()


def test_what_ranks_agree_on_is_what_was_accepted_with_lengths_side_by_side() -> None:
    """Kernels read lengths one behind the other."""
    drawn = torch.tensor([[1, 2, 3, 4]] * 2)
    accepted = accept(torch.tensor([[1, 2, 9], [9, 9, 9]]), drawn)
    group: Any = Together()
    found = agree(accepted, group)
    assert group.sent.shape == (2, 5)
    for ours, theirs in zip(found, accepted, strict=True):
        assert torch.equal(ours, theirs)
    assert found.lengths.stride() == (1,)
