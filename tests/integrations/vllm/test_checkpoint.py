"""What the plugin reads of a checkpoint, and what it tells vLLM of it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from knockon.bench.random_checkpoint import RandomCheckpoint
from knockon.drafters.config import DraftConfig, parse_draft_config
from knockon.errors import Refused
from knockon.integrations.vllm.checkpoint import asks_for_domino, hold_to_target, tell_vllm

DFLASH = ["DFlashDraftModel"]


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    _, draft = RandomCheckpoint(vocab_size=97).save(tmp_path_factory.mktemp("checkpoint"))
    return json.loads((draft / "config.json").read_text())


def target(**changed: int) -> SimpleNamespace:
    sizes = {"hidden": 64, "vocab": 97, "layers": 2, "max_model_len": 256} | changed
    return SimpleNamespace(
        get_hidden_size=lambda: sizes["hidden"],
        get_vocab_size=lambda: sizes["vocab"],
        hf_text_config=SimpleNamespace(num_hidden_layers=sizes["layers"]),
        max_model_len=sizes["max_model_len"],
    )


def asked(proposals: int) -> SimpleNamespace:
    return SimpleNamespace(num_speculative_tokens=proposals)


def draft(**fields: object) -> SimpleNamespace:
    return SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(**fields)))


@pytest.mark.parametrize(
    ("speculative", "domino"),
    [
        (draft(architectures=["DominoDraftModel"]), True),
        (draft(architectures=["DFlashDominoDraftModel"]), True),
        (
            draft(architectures=DFLASH, dflash_config={"projector_type": "domino"}),
            True,
        ),
        (draft(architectures=DFLASH, projector_type="domino"), True),
        # Unknown projectors are ours to refuse; vLLM would load what it knows of them.
        (draft(architectures=DFLASH, projector_type="causal_v5"), True),
        (
            draft(architectures=DFLASH, dflash_config={"projector_type": "dflash"}),
            False,
        ),
        (draft(architectures=DFLASH, dflash_config=None), False),
        (draft(architectures=None), False),
        (SimpleNamespace(draft_model_config=None), False),
        (None, False),
    ],
)
def test_domino_is_told_from_plain_dflash(speculative, domino):
    assert asks_for_domino(speculative) is domino


def test_a_drafter_of_this_target_is_accepted(raw):
    hold_to_target(parse_draft_config(raw), target(), asked(15))


@pytest.mark.parametrize(
    ("changed", "proposals", "field"),
    [
        ({"hidden": 128}, 15, "draft hidden_size: found 64, wanted the target's 128"),
        ({"vocab": 96}, 15, "draft vocab_size: found 97, wanted the target's 96"),
        ({"layers": 4}, 15, "draft num_target_layers: found 2, wanted the target's 4"),
        ({"max_model_len": 257}, 15, "draft max_position_embeddings: found 256"),
        ({}, 16, "num_speculative_tokens: found 16, wanted at most block_size - 1 = 15"),
    ],
)
def test_another_target_or_too_many_tokens_are_refused_by_field(raw, changed, proposals, field):
    with pytest.raises(Refused, match=field):
        hold_to_target(parse_draft_config(raw), target(**changed), asked(proposals))


def test_a_smaller_block_is_said(raw, caplog):
    with caplog.at_level("WARNING", "vllm.knockon"):
        hold_to_target(parse_draft_config(raw), target(), asked(7))
    assert "blocks of 8 rows" in caplog.text and "blocks of 16" in caplog.text


def told(config: DraftConfig, **hf: object) -> SimpleNamespace:
    fields = {"rope_parameters": {"rope_theta": 10000.0}, "dflash_config": {}} | hf
    found = SimpleNamespace(architectures=DFLASH, **fields)
    tell_vllm(config, SimpleNamespace(hf_config=found))
    return found


def test_vllm_is_told_what_stands_elsewhere_in_the_checkpoint(raw):
    flat = {k: v for k, v in raw.items() if k != "dflash_config"} | raw["dflash_config"]
    found = told(parse_draft_config(flat | {"architectures": ["DFlashDraftModel"]}))
    assert found.dflash_config == {
        "projector_type": "domino",
        "mask_token_id": 1,
        "target_layer_ids": [0],
        "causal": False,
    }
    assert found.architectures == ["DFlashDominoDraftModel"]


def test_sliding_layers_are_causal_with_their_window_unless_the_checkpoint_says_otherwise(raw):
    sliding = raw | {"layer_types": ["sliding_attention"], "sliding_window": 12}
    dflash = told(parse_draft_config(sliding)).dflash_config
    assert (dflash["causal"], dflash["swa_window_size"]) == (True, 12)
    assert told(parse_draft_config(sliding | {"is_causal": False})).dflash_config["causal"] is False


def test_layers_of_both_kinds_are_left_to_vllm(raw):
    mixed = raw | {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 12,
    }
    assert "causal" not in told(parse_draft_config(mixed)).dflash_config


@pytest.mark.parametrize("rope", [{"rope_theta": 1e6}, {}, None])
def test_a_rotary_base_that_vllm_reads_otherwise_is_refused(raw, rope):
    with pytest.raises(Refused, match="rope_theta as vLLM reads it"):
        told(parse_draft_config(raw), rope_parameters=rope)
