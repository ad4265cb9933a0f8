"""Shapes have the published sizes; weights made of them have the shapes' own."""

from __future__ import annotations

import json

import pytest
import torch

from knockon.bench.engine.shapes import (
    CONFIGS,
    draft_parameters,
    find_shape,
    shape_of,
    spread_layers,
    target_parameters,
)
from knockon.bench.engine.weights import STD, random_drafter, random_target
from knockon.errors import Refused
from knockon.models.config import parse_hf
from knockon.models.decoder import Decoder
from knockon.models.target import LAYERS
from knockon.parallel import SingleRank

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "count"),
    (
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-4b", 4_022_468_096),
        ("llama-3.1-8b", 8_030_261_248),
        ("smollm2-135m", 134_515_008),
        ("qwen3.6-27b", 26_895_998_464),  # transformers', without the part that reads images
    ),
)
def test_targets_have_the_parameters_of_the_published_checkpoints(name, count):
    config = find_shape(name).target
    assert target_parameters(config) == count
    model = Decoder(config, LAYERS[config.architecture], torch.bfloat16, SingleRank(), 8, "meta")
    held = sum(p.numel() for p in model.parameters())
    if config.architecture != "llama":  # head norms are held a row a head
        rows = config.num_heads + config.num_kv_heads - 2
        held -= config.num_attention_layers * rows * config.head_dim
    assert held == count


def test_drafters_are_those_that_were_published_for_such_targets():
    shape = find_shape("qwen3-8b")
    assert shape.dflash.target_layer_ids == (1, 9, 17, 25, 33)
    assert find_shape("qwen3.6-27b").dflash.target_layer_ids == (1, 16, 31, 46, 61)
    assert (shape.block_size, shape.dflash.backbone.num_layers) == (16, 5)
    assert shape.dflash.domino is None and shape.domino.domino is not None
    head = shape.domino.domino
    assert (head.gru_size, head.correction_size, head.prefix_len) == (1024, 256, 1)
    assert head.shift_label is False
    for name in CONFIGS:
        shape = find_shape(name)
        shape.domino.check_target(shape.target)
        assert draft_parameters(shape.domino) > draft_parameters(shape.dflash)


def test_feature_layers_are_distinct_and_never_the_last():
    for layers in range(2, 40):
        ids = spread_layers(layers, 5)
        assert len(ids) == min(5, layers - 1) == len(set(ids))
        assert ids[0] >= 0 and ids[-1] < layers - 1
    with pytest.raises(Refused, match="at least 2"):
        spread_layers(1, 5)


def test_a_config_file_or_its_folder_gives_a_shape(tmp_path):
    folder = tmp_path / "some-model"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(CONFIGS["smollm2-135m"]))
    for path in (folder, file):
        shape = find_shape(str(path))
        assert shape.name == "some-model"
        assert shape.target == find_shape("smollm2-135m").target


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(Refused) as refused:
        find_shape("gpt-5")
    assert refused.value.field == "model"
    assert all(name in refused.value.wanted for name in CONFIGS)


def test_weights_are_small_normals_the_same_for_the_same_seed():
    config = parse_hf(CONFIGS["tiny"] | {"num_hidden_layers": 2, "vocab_size": 512})
    shape = shape_of("small", config, 32, 16)
    targets = [random_target(config, torch.float32, CPU, 64, seed) for seed in (0, 0, 1)]
    weights = [target.embedding.weight for target in targets]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert float(weights[0].std()) == pytest.approx(STD, rel=0.05)
    assert targets[0].norm.weight.eq(1).all()
    drafters = [random_drafter(d, targets[0], 32, 100, 1) for d in (shape.dflash, shape.domino)]
    assert [drafter.name for drafter in drafters] == ["dflash", "domino"]
