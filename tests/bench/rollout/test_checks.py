from __future__ import annotations

import pytest
import torch

from knockon.bench.rollout.checks import (
    B_IS_C,
    GRAPH_IS_EAGER,
    RANKS_AGREE,
    ProposalsDiffer,
    check_batch,
)
from knockon.bench.rollout.rank import Prepared
from knockon.bench.rollout.variants import Variant

BASE, A, B, C = (Variant(stage) for stage in ("base", "A", "B", "C"))
TOKENS = torch.arange(24).view(3, 2, 4)


def ready(tokens: torch.Tensor = TOKENS, replayed: torch.Tensor | None = TOKENS) -> Prepared:
    return Prepared({}, {}, None, tokens, replayed)


def changed(tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    other = tokens.clone()
    other[1, 0, 2] = 99
    return other


def test_proposals_are_counted_by_comparison():
    of_ranks = {v: [ready(), ready()] for v in (BASE, A, B, C)}
    checked = check_batch(2, of_ranks, meaningful=True)
    assert checked == {GRAPH_IS_EAGER: 3 * 2 * 24, RANKS_AGREE: 3 * 24, B_IS_C: 24}


def test_ranks_need_not_agree_on_their_own_base_logits():
    of_ranks = {BASE: [ready(), ready(changed(), changed())]}
    assert not check_batch(2, of_ranks, meaningful=True)


def test_a_graph_that_differs_is_shown_with_the_first_difference():
    with pytest.raises(ProposalsDiffer) as found:
        check_batch(2, {A: [ready(), ready(replayed=changed())]}, meaningful=True)
    assert str(found.value) == (
        "batch 2, A, rank 1: graph proposes 99, eager 10 at input 1, request 0, proposal 2, "
        "counted from 0; 1 of 24 proposals differ"
    )


def test_ranks_that_differ_are_named():
    with pytest.raises(ProposalsDiffer, match="rank 0 proposes 10, rank 1 99"):
        check_batch(2, {C: [ready(), ready(changed(), changed())]}, meaningful=True)


def test_b_and_c_must_agree_where_tokens_mean_something():
    of_ranks = {B: [ready()], C: [ready(changed(), changed())]}
    with pytest.raises(ProposalsDiffer, match="B proposes 10, C 99"):
        check_batch(2, of_ranks, meaningful=True)
    assert check_batch(2, of_ranks, meaningful=False) == {GRAPH_IS_EAGER: 48}


def test_a_graph_of_base_that_differs_is_found_too():
    with pytest.raises(ProposalsDiffer, match="batch 2, base, rank 0: graph"):
        check_batch(2, {BASE: [ready(replayed=changed())]}, meaningful=False)
