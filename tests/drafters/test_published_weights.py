from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from knockon.bench.random_checkpoint import RandomCheckpoint
from knockon.drafters.config import parse_draft_config
from knockon.drafters.published_weights import sort_published
from knockon.errors import Refused


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    _, draft = RandomCheckpoint(vocab_size=97).save(tmp_path_factory.mktemp("published"))
    config = parse_draft_config(json.loads((draft / "config.json").read_text()))
    return config, load_file(draft / "model.safetensors")


def test_every_weight_goes_to_backbone_or_head_as_it_is(published):
    config, weights = published
    found = sort_published(weights.items(), config, "it")
    assert set(found.head) == {n for n in weights if n.startswith(("prefix_gru.", "embed_proj."))}
    assert set(found.head) | set(found.backbone) == set(weights)
    for name, tensor in (found.backbone | found.head).items():
        assert tensor is weights[name]


def test_containers_of_other_publishers_are_left_out_of_the_names(published):
    config, weights = published
    spelt = {
        (f"logit_head.{n}" if n.startswith(("prefix_gru.", "embed_proj.")) else f"model.{n}"): w
        for n, w in weights.items()
    }
    assert set(sort_published(spelt.items(), config, "it").backbone) < set(weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("embed_proj.2.weight"), "missing"),
        (lambda w: w.update({"layers.1.mlp.up_proj.weight": torch.zeros(1)}), "without a use"),
        (lambda w: w.update({"model.fc.weight": w["fc.weight"]}), "two names"),
        (lambda w: w.update({"lm_head.weight": torch.zeros(1)}), "borrows"),
        (lambda w: w.update({"fc.weight": torch.zeros(3, 3)}), "fc.weight"),
        (lambda w: w.update({"embed_proj.2.weight": torch.zeros(96, 32)}), "(97, 32)"),
        (lambda w: w.update({"layers.0.self_attn.q_norm.weight": torch.zeros(5)}), "q_norm"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(published, change, message):
    config, weights = published
    changed = dict(weights)
    change(changed)
    with pytest.raises(Refused, match="it: weight") as refused:
        sort_published(changed.items(), config, "it")
    assert message in str(refused.value)


def test_a_weight_that_comes_twice_is_refused(published):
    config, weights = published
    pairs = [*weights.items(), ("fc.weight", weights["fc.weight"])]
    with pytest.raises(Refused, match=r"it: weight fc\.weight: found 'twice'"):
        sort_published(pairs, config, "it")
