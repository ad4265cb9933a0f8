"""The loop learns, resumes exactly, and refuses what cannot be trained."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from knockon.drafters.config import parse_draft_config
from knockon.errors import Refused
from knockon.train.drafter_module import DraftModule
from knockon.train.evaluate import HeldOut, accept_lengths
from knockon.train.frozen_target import FrozenTarget
from knockon.train.loop import Trainer
from knockon.train.sequences import BatchOrder, PackedSequences
from knockon.train.settings import TrainSettings

SETTINGS = TrainSettings(steps=6, batch_size=4, anchors=3, log_every=3, chunk=16, warmup=0.1)


def sequences(count: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Prompts of a few tokens, answers that count upwards: easy to learn."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        start = int(torch.randint(3, 40, (1,), generator=generator))
        length = int(torch.randint(8, 20, (1,), generator=generator))
        found.append(([3, start], [start + 1 + i for i in range(length)]))
    return found


@pytest.fixture
def data() -> PackedSequences:
    return PackedSequences.pack(sequences(20))


def fresh(draft_dict: dict) -> DraftModule:
    module = DraftModule(parse_draft_config(draft_dict))
    module.initialise(0)
    return module


def test_resume_continues_the_same_run(
    target: FrozenTarget, draft_dict: dict, data: PackedSequences, tmp_path: Path
) -> None:
    whole = Trainer(target, fresh(draft_dict), data, SETTINGS)
    whole.run()
    first = Trainer(target, fresh(draft_dict), data, SETTINGS)
    for _ in range(3):
        first.step()
    first.checkpoint(tmp_path / "state.pt")
    second = Trainer(target, fresh(draft_dict), data, SETTINGS)
    second.resume(tmp_path / "state.pt")
    assert second.progress == 0.5
    second.run()
    for ours, theirs in zip(second.masters.tensors, whole.masters.tensors, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_resume_under_other_settings_is_refused(
    target: FrozenTarget, draft_dict: dict, data: PackedSequences, tmp_path: Path
) -> None:
    Trainer(target, fresh(draft_dict), data, SETTINGS).checkpoint(tmp_path / "state.pt")
    other = Trainer(target, fresh(draft_dict), data, replace(SETTINGS, gamma=3.0))
    with pytest.raises(Refused, match="gamma"):
        other.resume(tmp_path / "state.pt")


def test_data_without_answers_is_refused(target: FrozenTarget, draft_dict: dict) -> None:
    empty = PackedSequences.pack([([3, 4, 5], [6]) for _ in range(8)])
    with pytest.raises(Refused, match="supervised tokens"):
        Trainer(target, fresh(draft_dict), empty, SETTINGS)


def test_muon_moves_the_layers_and_resumes_exactly(
    target: FrozenTarget, draft_dict: dict, data: PackedSequences, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, optimizer="muon")
    whole = Trainer(target, fresh(draft_dict), data, settings)
    losses = [float(whole.step()["loss"]) for _ in range(6)]
    assert losses[-1] < losses[0]
    first = Trainer(target, fresh(draft_dict), data, settings)
    for _ in range(3):
        first.step()
    first.checkpoint(tmp_path / "state.pt")
    second = Trainer(target, fresh(draft_dict), data, settings)
    second.resume(tmp_path / "state.pt")
    second.run()
    adam = Trainer(target, fresh(draft_dict), data, SETTINGS)
    adam.run()
    named = zip(
        dict(second.module.named_parameters()),
        *(trainer.masters.tensors for trainer in (second, whole, adam)),
        strict=True,
    )
    for name, ours, theirs, others in named:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        if name.endswith("qkv.weight"):
            assert not torch.allclose(ours, others, atol=1e-4)


@pytest.mark.parametrize("domino", [True, False])
def test_overfitting_raises_the_accept_length(
    target: FrozenTarget, draft_dict: dict, domino: bool
) -> None:
    if not domino:
        draft_dict["architectures"] = ["DFlashDraftModel"]
        kept = ("mask_token_id", "target_layer_ids")
        draft_dict["dflash_config"] = {k: draft_dict["dflash_config"][k] for k in kept}
    pairs = sequences(12)
    module = fresh(draft_dict)
    held = [HeldOut("seen", pairs)]
    before = accept_lengths(module, target, held, (4,))["mean"]["4"]
    # The labels here are not the target's own choices, so its distribution would only disturb.
    settings = replace(SETTINGS, steps=60, batch_size=12, anchors=8, peak_rate=1e-2, soft=0.0)
    Trainer(target, module, PackedSequences.pack(pairs), settings).run()
    after = accept_lengths(module, target, held, (4,))["mean"]["4"]
    assert after > max(2.0, before + 0.5)


def test_the_target_can_start_the_draft_layers(target: FrozenTarget, draft_dict: dict) -> None:
    module = fresh(draft_dict)
    module.initialise(0, target)
    down = module.backbone.layers[1].down.weight
    assert torch.equal(down, target.layers[-1].down)
    assert torch.equal(module.backbone.norm.weight, target.norm)


def test_every_epoch_shows_every_sequence_once() -> None:
    order = BatchOrder(torch.randint(5, 90, (40,)), 4, seed=1, stretch=3)
    epochs = [[order.batch(10 * e + i)[0].tolist() for i in range(10)] for e in range(2)]
    for batches in epochs:
        assert sorted(chain.from_iterable(batches)) == list(range(40))
    assert epochs[0] != epochs[1]


def test_batches_mask_prompt_and_padding() -> None:
    data = PackedSequences.pack([([5, 6], [7, 8, 9]), ([4], [3])])
    tokens, supervised = data.batch(torch.tensor([1, 0]), 6)
    assert tokens.tolist() == [[4, 3, 0, 0, 0, 0], [5, 6, 7, 8, 9, 0]]
    assert supervised.int().tolist() == [[0, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 0]]


def test_packed_sequences_survive_the_disk(data: PackedSequences, tmp_path: Path) -> None:
    data.save(tmp_path / "data.safetensors")
    again = PackedSequences.load(tmp_path / "data.safetensors")
    assert torch.equal(again.tokens, data.tokens)
    assert again.answer_tokens == data.answer_tokens
