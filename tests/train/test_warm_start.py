"""Training goes on from a published drafter: its weights, and no other's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from knockon.drafters.config import parse_draft_config
from knockon.drafters.mtp_config import parse_mtp_config
from knockon.errors import Refused
from knockon.train.drafter_module import DraftModule
from knockon.train.export import draft_config_dict, export, mtp_config_dict, named_weights
from knockon.train.frozen_target import FrozenTarget
from knockon.train.mtp_module import MTPModule
from knockon.train.warm_start import start_from


def block_drafter(target: FrozenTarget, seed: int, **changes: object) -> tuple[DraftModule, dict]:
    sizes = {
        "layers": 2,
        "target_layer_ids": (0, 1, 2),
        "mask_token_id": 0,
        "block_size": 4,
        "gru_size": 8,
        "correction_size": 8,
    }
    config = draft_config_dict(target.config, **sizes | changes)  # type: ignore[arg-type]
    module = DraftModule(parse_draft_config(config))
    module.initialise(seed)
    return module, config


def published(module: DraftModule | MTPModule, config: dict, folder: Path) -> Path:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter).bfloat16())
    export(module, config, folder, "card")
    return folder


def same(ours: DraftModule | MTPModule, theirs: DraftModule | MTPModule, *names: str) -> bool:
    one, two = named_weights(ours), named_weights(theirs)
    return all(torch.equal(one[name], two[name]) for name in names or one)


def test_a_block_drafter_and_an_mtp_head_go_on_from_their_own_kind(
    target: FrozenTarget, tmp_path: Path
) -> None:
    earlier, config = block_drafter(target, 0)
    folder = published(earlier, config, tmp_path / "domino")
    module = block_drafter(target, 1)[0]
    start_from(module, folder, target.config)
    assert same(module, earlier)

    config = mtp_config_dict(target.config)
    heads = [MTPModule(parse_mtp_config(config), 3) for _ in range(2)]
    for seed, head in enumerate(heads):
        head.initialise(seed)
    folder = published(heads[0], config, tmp_path / "mtp")
    start_from(heads[1], folder, target.config)
    assert same(heads[1], heads[0])
    with pytest.raises(Refused, match="architecture: found 'MTPConfig'"):
        start_from(module, folder, target.config)


def test_dflash_takes_a_domino_drafters_backbone_and_domino_keeps_its_own_head(
    target: FrozenTarget, tmp_path: Path
) -> None:
    domino, config = block_drafter(target, 0, shift_label=False)
    folder = published(domino, config, tmp_path / "domino")
    plain, plain_config = block_drafter(target, 1, domino=False)
    start_from(plain, folder, target.config)
    assert same(plain, domino, *named_weights(plain))

    folder = published(plain, plain_config, tmp_path / "dflash")
    other, fresh = (block_drafter(target, 2, shift_label=False)[0] for _ in range(2))
    start_from(other, folder, target.config)
    assert same(other, plain, *named_weights(plain))
    assert same(other, fresh, "prefix_gru.weight_ih_l0", "embed_proj.2.weight")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layers": 1}, "visibility"),
        ({"block_size": 8}, "block_size"),
        ({"mask_token_id": 5}, "mask_token_id"),
        ({"target_layer_ids": (0, 1)}, "feature_size"),
        ({"gru_size": 16}, "gru_size"),
    ],
)
def test_a_drafter_of_another_size_is_refused_by_field(
    target: FrozenTarget, tmp_path: Path, changes: dict, named: str
) -> None:
    folder = published(*block_drafter(target, 0), tmp_path / "domino")
    with pytest.raises(Refused, match=named):
        start_from(block_drafter(target, 1, **changes)[0], folder, target.config)


def test_a_backbone_of_shifted_rows_is_not_passed_to_dflash_or_back(
    target: FrozenTarget, tmp_path: Path
) -> None:
    shifted, plain = block_drafter(target, 0), block_drafter(target, 1, domino=False)
    for number, (one, other) in enumerate([(shifted, plain), (plain, shifted)]):
        folder = published(*one, tmp_path / str(number))
        with pytest.raises(Refused, match="shift_label"):
            start_from(other[0], folder, target.config)
