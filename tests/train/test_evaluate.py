"""Replay counts what speculative decoding would keep."""

from __future__ import annotations

import torch

from knockon.train.drafter_module import DraftModule
from knockon.train.evaluate import propose_everywhere, replay
from knockon.train.frozen_target import FrozenTarget
from knockon.train.objective import Anchors


def test_replay_walks_by_accepted_prefix_and_bonus() -> None:
    assert replay([3, 0, 0, 0, 1, 0, 2], 4) == (7, 3)
    assert replay([3, 0, 0, 0, 1, 0, 2], 2) == (7, 5)
    assert replay([15] * 40, 16) == (40, 3)
    assert replay([0] * 5, 8) == (5, 5)


def test_proposals_do_not_depend_on_the_answer_after_their_anchor(
    target: FrozenTarget, module: DraftModule
) -> None:
    torch.manual_seed(2)
    with torch.no_grad():
        module.embed_proj[2].weight.normal_()
    tokens = torch.randint(3, 96, (1, 20))
    other = tokens.clone()
    other[:, 11:] = torch.randint(3, 96, (1, 9))
    anchors = Anchors(torch.tensor([[6, 10]]), torch.ones(1, 2, dtype=torch.bool))
    layers = module.config.target_layer_ids
    first = propose_everywhere(module, target, tokens, anchors, layers)
    second = propose_everywhere(module, target, other, anchors, layers)
    assert torch.equal(first, second)
