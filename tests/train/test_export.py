"""What is exported is what is loaded, strictly, by this room and by the drafters' own reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from knockon.drafters.config import parse_draft_config
from knockon.errors import Refused
from knockon.models.safetensors_source import SafetensorsFolder
from knockon.models.strict import load_strictly
from knockon.train.drafter_module import DraftModule
from knockon.train.export import export, model_card, published_weights
from knockon.train.frozen_target import FrozenTarget
from knockon.train.warm_start import load_module


@pytest.fixture
def folder(module: DraftModule, draft_dict: dict, tmp_path: Path) -> Path:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter).bfloat16())
    card = model_card("a/model", "apache-2.0", draft_dict, {"sequences": 3}, {}, "table")
    export(module, draft_dict, tmp_path / "out", card, max_shard=20_000)
    return tmp_path / "out"


def test_round_trip(folder: Path, module: DraftModule, target: FrozenTarget) -> None:
    again = load_module(folder, target.config)
    for (name, ours), theirs in zip(again.named_parameters(), module.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert all(file.stat().st_size < 30_000 for file in folder.glob("*.safetensors"))
    assert "a/model" in (folder / "README.md").read_text()


def test_a_missing_weight_is_named(folder: Path, target: FrozenTarget) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    weights = load_file(file)
    weights.pop("fc.weight")
    save_file(weights, file)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"].pop("fc.weight")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Refused, match=r"fc\.weight"):
        load_module(folder, target.config)


def test_names_are_those_of_the_published_format(module: DraftModule, draft_dict: dict) -> None:
    names = set(published_weights(module))
    wanted = set(module.backbone.loaders()) | {
        "prefix_gru.weight_ih_l0",
        "prefix_gru.weight_hh_l0",
        "embed_proj.0.weight",
        "embed_proj.2.weight",
    }
    assert names == wanted
    parse_draft_config(draft_dict)


def test_weights_that_are_not_finite_are_refused(
    module: DraftModule, draft_dict: dict, tmp_path: Path
) -> None:
    with torch.no_grad():
        module.backbone.norm.weight[0] = float("nan")
    with pytest.raises(Refused, match=r"norm\.weight"):
        export(module, draft_dict, tmp_path, "")


def test_the_folder_holds_nothing_else(folder: Path, module: DraftModule) -> None:
    loaders = dict.fromkeys(published_weights(module), lambda _: None)
    load_strictly(SafetensorsFolder(folder), loaders)
