"""An MTP head learns, trains on what it is served with, and proposes the same in the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.train.test_loop import SETTINGS, sequences
from transformers import LlamaForCausalLM

from knockon.drafters.load import load_drafter
from knockon.drafters.mtp_config import parse_mtp_config
from knockon.layers.attention import PagedKV, plan_block
from knockon.layers.attention.sdpa import SdpaBackend
from knockon.models.target import load_target
from knockon.parallel import SingleRank
from knockon.train.evaluate import HeldOut, accept_lengths, propose_everywhere
from knockon.train.export import export, mtp_config_dict, published_weights
from knockon.train.frozen_target import FrozenTarget
from knockon.train.loop import Trainer
from knockon.train.mtp_module import MTPModule
from knockon.train.objective import Anchors
from knockon.train.sequences import PackedSequences

STEPS = 3


def fresh(target: FrozenTarget, start: FrozenTarget | None = None) -> MTPModule:
    module = MTPModule(parse_mtp_config(mtp_config_dict(target.config)), STEPS)
    module.initialise(0, start)
    return module


def anchors_at(*positions: int) -> Anchors:
    return Anchors(torch.tensor([positions]), torch.ones(1, len(positions), dtype=torch.bool))


@pytest.mark.parametrize("started", [False, True])
def test_overfitting_raises_the_accept_length(target: FrozenTarget, started: bool) -> None:
    pairs = sequences(12)
    module = fresh(target, target if started else None)
    held = [HeldOut("seen", pairs)]
    before = accept_lengths(module, target, held, (4,))["mean"]["4"]
    settings = replace(SETTINGS, steps=60, batch_size=12, anchors=8, peak_rate=1e-2, soft=0.0)
    Trainer(target, module, PackedSequences.pack(pairs), settings).run()
    after = accept_lengths(module, target, held, (4,))["mean"]["4"]
    assert after > max(2.0, before + 0.5)


def test_resume_continues_the_same_run(target: FrozenTarget, tmp_path: Path) -> None:
    data = PackedSequences.pack(sequences(20))
    whole = Trainer(target, fresh(target), data, SETTINGS)
    whole.run()
    first = Trainer(target, fresh(target), data, SETTINGS)
    for _ in range(3):
        first.step()
    first.checkpoint(tmp_path / "state.pt")
    second = Trainer(target, fresh(target), data, SETTINGS)
    second.resume(tmp_path / "state.pt")
    second.run()
    for ours, theirs in zip(second.masters.tensors, whole.masters.tensors, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_rows_see_no_later_state_and_no_other_chain(target: FrozenTarget) -> None:
    """States at an anchor and behind it move nothing; the state right before it does."""
    module = fresh(target)
    torch.manual_seed(3)
    tokens = torch.randint(3, 96, (1, 20))
    hidden, none = target.forward(tokens)
    alone = module.proposal_hidden(target, tokens, hidden, none, anchors_at(9))
    beside = module.proposal_hidden(target, tokens, hidden, none, anchors_at(9, 10, 12))
    torch.testing.assert_close(beside[:, :1], alone, rtol=1e-5, atol=1e-5)
    later = hidden.clone()
    later[:, 9:] += 1
    moved = module.proposal_hidden(target, tokens, later, none, anchors_at(9))
    torch.testing.assert_close(moved, alone, rtol=0, atol=0)
    later[:, 8] += 1
    moved = module.proposal_hidden(target, tokens, later, none, anchors_at(9))
    assert (moved - alone).abs().amin(-1).amax() > 0 and (moved[:, :, 2] != alone[:, :, 2]).any()


def test_gradients_reach_every_weight_through_every_step(target: FrozenTarget) -> None:
    module = fresh(target)
    tokens = torch.randint(3, 96, (1, 20))
    hidden, none = target.forward(tokens)
    z = module.proposal_hidden(target, tokens, hidden, none, anchors_at(9, 12))
    z[:, :, -1].sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_an_exported_head_proposes_the_same_chain_in_the_engine(
    llama: LlamaForCausalLM, target: FrozenTarget, tmp_path: Path
) -> None:
    module = fresh(target, target)
    with torch.no_grad():
        for parameter in module.parameters():  # as BF16 will hold them
            parameter.copy_((parameter + 0.1 * torch.randn_like(parameter)).bfloat16())
    llama.save_pretrained(tmp_path / "target")
    export(module, mtp_config_dict(target.config), tmp_path / "draft", "card")
    served = load_target(tmp_path / "target", torch.float32, SingleRank())
    drafter = load_drafter(tmp_path / "draft", served, SdpaBackend(), 128, mtp_steps=STEPS)
    assert set(published_weights(module)) == set(drafter.head.loaders())  # type: ignore[attr-defined]
    drafter.bind_kv(128)

    torch.manual_seed(4)
    tokens = torch.randint(3, 96, (1, 24))
    pages = torch.arange(1, 8)[None]
    kv = [PagedKV.allocate(128, 1, 16, torch.float32) for _ in range(4)]
    plan = plan_block(pages, 16, torch.tensor([0]), 24, 24)
    output = served(tokens, plan, kv, drafter.feature_layers)
    assert output.features is not None
    drafter.observe(output.features, tokens, plan)
    ours = propose_everywhere(module, target, tokens, anchors_at(4, 11, 23), ())
    for block, anchor in enumerate([4, 11, 23]):
        rows = plan_block(pages, 16, torch.tensor([anchor]), STEPS + 1, anchor + STEPS + 1)
        theirs = drafter.propose(tokens[:, anchor], rows, STEPS)
        assert theirs.tolist() == ours[:, block].tolist()
        drafter.observe(output.features, tokens, plan)
