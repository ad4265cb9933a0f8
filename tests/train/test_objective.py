"""The objective sees what it may and weighs what it should."""

from __future__ import annotations

import math

import pytest
import torch

from knockon.errors import Refused
from knockon.train import drafter_module
from knockon.train.drafter_module import DraftModule
from knockon.train.frozen_target import FrozenTarget
from knockon.train.objective import (
    Anchors,
    block_labels,
    correction_lambda,
    learning_rate,
    refuse_unsupervised,
    sample_anchors,
    teacher_tokens,
    visibility,
)


def one(position: int) -> Anchors:
    return Anchors(torch.tensor([[position]]), torch.ones(1, 1, dtype=torch.bool))


def test_a_state_at_or_after_the_anchor_does_not_move_a_block(
    target: FrozenTarget, module: DraftModule
) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(3, 96, (1, 24))
    _, features = target.forward(tokens, module.config.target_layer_ids)
    anchors = Anchors(torch.tensor([[10, 12]]), torch.ones(1, 2, dtype=torch.bool))
    before = module.block_hidden(target, tokens, features, anchors)
    later = features.clone()
    later[:, 10:] += 1.0
    after = module.block_hidden(target, tokens, later, anchors)
    torch.testing.assert_close(after[:, 0], before[:, 0], rtol=0, atol=0)
    assert not torch.equal(after[:, 1], before[:, 1])
    earlier = features.clone()
    earlier[:, 9] += 1.0
    moved = module.block_hidden(target, tokens, earlier, anchors)
    assert not torch.equal(moved[:, 0], before[:, 0])


def test_a_block_does_not_see_another_block(target: FrozenTarget, module: DraftModule) -> None:
    tokens = torch.randint(3, 96, (1, 24))
    _, features = target.forward(tokens, module.config.target_layer_ids)
    valid = torch.ones(1, 2, dtype=torch.bool)
    first = module.block_hidden(target, tokens, features, Anchors(torch.tensor([[9, 10]]), valid))
    second = module.block_hidden(target, tokens, features, Anchors(torch.tensor([[9, 17]]), valid))
    torch.testing.assert_close(first[:, 0], second[:, 0], rtol=0, atol=0)


def test_the_mask_is_two_sided_in_the_block_and_ends_at_documents() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    seen = visibility(Anchors(torch.tensor([[2, 5]]), torch.ones(1, 2).bool()), 8, 2, documents)[0]
    assert seen[0, :8].tolist() == [True, True] + [False] * 6
    assert seen[2, :8].tolist() == [False] * 3 + [True] * 2 + [False] * 3
    assert seen[:, 8:].tolist() == [
        [True, True, False, False],
        [True, True, False, False],
        [False, False, True, True],
        [False, False, True, True],
    ]


def test_anchors_and_their_next_tokens_are_supervised() -> None:
    supervised = torch.zeros(2, 30, dtype=torch.bool)
    supervised[0, 10:20] = True
    supervised[1, 5] = True
    supervised[1, 28:] = True
    anchors = sample_anchors(supervised, 12)
    chosen = anchors.position[0][anchors.valid[0]].tolist()
    assert sorted(chosen) == list(range(10, 19))
    assert anchors.position[1][anchors.valid[1]].tolist() == [28]


@pytest.mark.parametrize("shift", [True, False])
def test_labels_weights_and_the_span(shift: bool) -> None:
    tokens = torch.arange(100, 120)[None]
    supervised = torch.zeros(1, 20, dtype=torch.bool)
    supervised[0, 5:12] = True
    labels = block_labels(tokens, supervised, one(8), 6, shift, 7.0, 1)
    rows = 6 if shift else 5
    assert labels.token.shape == (1, 1, rows)
    assert labels.token[0, 0].tolist() == [109 + j for j in range(rows)]
    want = [math.exp(-j / 7.0) if 9 + j < 12 else 0.0 for j in range(rows)]
    torch.testing.assert_close(labels.weight[0, 0], torch.tensor(want))
    assert labels.corrected[0, 0].tolist() == [False] + [True] * (rows - 1)


def test_rows_past_a_gap_or_the_end_do_not_count() -> None:
    tokens = torch.arange(10)[None]
    supervised = torch.ones(1, 10, dtype=torch.bool)
    supervised[0, 6] = False
    labels = block_labels(tokens, supervised, one(4), 4, True, 7.0, 1)
    assert (labels.weight[0, 0] > 0).tolist() == [True, False, False, False]
    labels = block_labels(tokens, supervised, one(8), 4, True, 7.0, 1)
    assert (labels.weight[0, 0] > 0).tolist() == [True, False, False, False]


def test_an_invalid_anchor_weighs_nothing() -> None:
    anchors = Anchors(torch.tensor([[0]]), torch.zeros(1, 1, dtype=torch.bool))
    supervised = torch.ones(1, 8, dtype=torch.bool)
    assert (
        block_labels(torch.arange(8)[None], supervised, anchors, 4, True, 7.0, 1).weight.sum() == 0
    )


def test_the_gru_reads_true_tokens_up_to_each_row() -> None:
    assert teacher_tokens(torch.arange(50, 60)[None], one(3), 4).tolist() == [[[53, 54, 55, 56]]]


def test_lambda_falls_from_one_over_the_first_half() -> None:
    assert correction_lambda(0.0) == 1.0
    assert correction_lambda(0.25) == 0.5
    assert correction_lambda(0.5) == correction_lambda(1.0) == 0.0
    assert correction_lambda(0.0, 0.3) == 1.0
    assert correction_lambda(0.5, 0.3) == correction_lambda(0.9, 0.3) == pytest.approx(0.3)


def test_the_rate_rises_then_falls_to_zero() -> None:
    assert learning_rate(0.0, 0.1, 2.0) == 0.0
    assert learning_rate(0.1, 0.1, 2.0) == 2.0
    assert learning_rate(1.0, 0.1, 2.0) == pytest.approx(0.0)


def test_data_without_anything_to_learn_is_refused() -> None:
    with pytest.raises(Refused, match="supervised tokens"):
        refuse_unsupervised(torch.tensor([[False, True, False, True]]))
    refuse_unsupervised(torch.tensor([[False, True, True]]))


@pytest.mark.parametrize("rows", [4, 8, 12])
def test_blocks_are_the_same_in_whatever_groups_they_attend(
    target: FrozenTarget, module: DraftModule, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(3, 96, (2, 24))
    _, features = target.forward(tokens, module.config.target_layer_ids)
    position = torch.tensor([[9, 17, 5, 20, 11], [3, 4, 22, 8, 10]])
    anchors = Anchors(position, torch.ones_like(position, dtype=torch.bool))

    def run() -> tuple[torch.Tensor, ...]:
        found = module.block_hidden(target, tokens, features, anchors)
        weights = list(module.backbone.parameters())
        return found, *torch.autograd.grad((found**2).sum(), weights)

    whole = run()
    monkeypatch.setattr(drafter_module, "_ROWS_TOGETHER", rows)
    for ours, theirs in zip(run(), whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
