"""What cannot be served is refused at the start, by name, with both values; never found out later.

Pitfalls 6 to 8 and 18 to 21.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from knockon.engine.config import EngineConfig
from knockon.engine.hardware import GPU, Hardware
from knockon.engine.llm import LLM
from knockon.engine.sampling_params import SamplingParams
from knockon.engine.settle import settle
from knockon.errors import Refused
from tests.engine.generation import GREEDY, TinyShelf, check_same, generate, load
from tests.tiny_models import HIDDEN, LAYERS, TinyDrafter, TinyTarget, write_drafter
from tests.tiny_tokenizer import VOCAB_SIZE

PROMPT = [5, 6, 7, 8]
CPU_ONLY = Hardware("a CPU", 2, (), 2**34, 2**33, ())
Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def changed(draft: Path, folder: Path, change: Change) -> Path:
    """A copy of a drafter with its config and weights changed."""
    config = json.loads((draft / "config.json").read_text())
    weights = load_file(draft / "model.safetensors")
    change(config, weights)
    return write_drafter(folder, config, weights)


def set_config(**fields: Any) -> Change:
    return lambda config, weights: config.update(fields)


def set_extra(**fields: Any) -> Change:
    return lambda config, weights: config["dflash_config"].update(fields)


def drop(*names: str) -> Change:
    def change(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        for name in names:
            found = [d for d in (config, config["dflash_config"], weights) if name in d]
            assert found, name
            for each in found:
                del each[name]

    return change


def add_weight(name: str, like: str = "fc.weight") -> Change:
    return lambda config, weights: weights.update({name: weights[like].clone()})


def cut_weight(name: str) -> Change:
    return lambda config, weights: weights.update({name: weights[name][:-1].contiguous()})


BAD_DRAFTERS: dict[str, tuple[Change, str]] = {
    "block of 1": (set_config(block_size=1), r"block_size: found 1, wanted at least 2"),
    "mask outside": (
        set_extra(mask_token_id=VOCAB_SIZE),
        rf"mask_token_id: found {VOCAB_SIZE}, wanted 0 to .* {VOCAB_SIZE - 1}",
    ),
    "no mask": (drop("mask_token_id"), r"mask_token_id: found None"),
    "layer outside": (
        set_extra(target_layer_ids=[0, LAYERS]),
        rf"target_layer_ids: found {LAYERS}, wanted 0 to {LAYERS - 2}",
    ),
    "negative layer": (set_extra(target_layer_ids=[-1, 0]), r"target_layer_ids: found -1"),
    "last layer": (
        set_extra(target_layer_ids=[0, LAYERS - 1]),
        rf"target_layer_ids: found {LAYERS - 1}, .*final norm",
    ),
    "no layers": (set_extra(target_layer_ids=[]), r"target_layer_ids: found \[\]"),
    "layer twice": (set_extra(target_layer_ids=[1, 1]), r"target_layer_ids: found \[1, 1\]"),
    "other vocabulary": (
        set_config(vocab_size=VOCAB_SIZE + 5),
        rf"vocab_size: found {VOCAB_SIZE + 5}, wanted the target's {VOCAB_SIZE}",
    ),
    "reduced vocabulary": (set_config(draft_vocab_size=100), r"draft_vocab_size: found 100"),
    "other hidden size": (
        set_config(hidden_size=HIDDEN * 2),
        rf"hidden_size: found {HIDDEN * 2}, wanted the target's {HIDDEN}",
    ),
    "other depth of target": (
        set_config(num_target_layers=7),
        rf"num_target_layers: found 7, wanted the target's {LAYERS}",
    ),
    "unknown projector": (
        set_extra(projector_type="dominoes"),
        r"projector_type: found 'dominoes', wanted dflash or domino",
    ),
    "no shift_label": (drop("shift_label"), r"shift_label: found None"),
    "no prefix length": (drop("pure_draft_prefix_len"), r"pure_draft_prefix_len: found None"),
    "prefix of a block": (set_extra(pure_draft_prefix_len=16), r"pure_draft_prefix_len: found 16"),
    "fields that disagree": (
        set_config(mask_token_id=3),
        r"mask_token_id: found 306, wanted the top level's mask_token_id = 3",
    ),
    "no rotary base": (drop("rope_theta"), r"rope_theta: found None"),
    "rotary bases that disagree": (
        set_config(rope_parameters={"rope_theta": 5.0}),
        r"rope_theta: found .*elsewhere",
    ),
    "layer types of another depth": (
        set_config(layer_types=["full_attention"]),
        r"layer_types: found \['full_attention'\], wanted 3 entries",
    ),
    "another activation": (set_config(hidden_act="gelu"), r"hidden_act: found 'gelu'"),
    "odd head size": (set_config(head_dim=15), r"head_dim: found 15, wanted an even number"),
    "heads in no groups": (set_config(num_key_value_heads=2), r"num_attention_heads: found 9"),
    "no architecture": (drop("architectures"), r"architectures: found None"),
    "settings that are no object": (set_config(dflash_config=[1]), r"dflash_config: found \[1\]"),
    "no window": (drop("sliding_window"), r"sliding_window: found None"),
    "other GRU width": (set_extra(gru_hidden_dim=32), r"prefix_gru.*\(192, 144\).*\(96, 144\)"),
    "other correction width": (
        set_extra(emb_dim=8),
        r"embed_proj.*found \(72, 208\), wanted \(8, 208\)",
    ),
    "own head": (add_weight("lm_head.weight"), r"lm_head.weight.*borrows the target's"),
    "own embedding": (add_weight("embed_tokens.weight"), r"embed_tokens.weight.*borrows"),
    "missing weight": (
        drop("layers.1.mlp.up_proj.weight"),
        r"weights missing: found \['layers.1.mlp.up_proj.weight'\]",
    ),
    "missing head": (drop("embed_proj.2.weight"), r"missing: found \['embed_proj.2.weight'\]"),
    "unused weight": (
        add_weight("layers.3.mlp.up_proj.weight"),
        r"without a use: found \['layers.3.mlp.up_proj.weight'\]",
    ),
    "doubled weight": (
        add_weight("model.fc.weight"),
        r"fc.weight: found .*'fc.weight' and 'model.fc.weight'",
    ),
    "weight cut short": (cut_weight("layers.0.mlp.gate_proj.weight"), r"gate_proj.*\(111, 144\)"),
    "context shorter than served": (
        set_config(max_position_embeddings=100),
        r"max_position_embeddings: found 100, wanted at least max_model_len 200",
    ),
}


@pytest.mark.parametrize("case", BAD_DRAFTERS)
def test_a_drafter_that_does_not_fit_is_refused(tiny: TinyShelf, tmp_path: Path, case: str) -> None:
    change, message = BAD_DRAFTERS[case]
    draft = changed(tiny.drafter("domino"), tmp_path, change)
    with pytest.raises(Refused, match=message):
        load(tiny.target(), draft, max_model_len=200)


def renamed(rule: Callable[[str], str]) -> Change:
    def change(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        for name in list(weights):
            weights[rule(name)] = weights.pop(name)

    return change


@pytest.mark.parametrize(
    "rule",
    [
        lambda name: f"model.{name}",
        lambda name: f"logit_head.{name}" if name.startswith(("prefix_gru", "embed_p")) else name,
    ],
    ids=["all under model.", "head under logit_head."],
)
def test_other_publishers_names_load_the_same_drafter(
    tiny: TinyShelf, tmp_path: Path, rule: Callable[[str], str]
) -> None:
    draft = changed(tiny.drafter("domino"), tmp_path, renamed(rule))
    prompts = [PROMPT, [9, 10]]
    expected = generate(tiny.target(), tiny.drafter("domino"), prompts, verify_width=8)
    check_same(generate(tiny.target(), draft, prompts, verify_width=8), expected)


def test_a_shorter_rotary_table_shortens_the_context_where_none_is_asked_for(
    tiny: TinyShelf, tmp_path: Path
) -> None:
    short = set_config(max_position_embeddings=100)
    draft = changed(tiny.drafter("domino"), tmp_path, short)
    params = replace(GREEDY, max_tokens=400)
    (output,) = generate(tiny.target(), draft, [PROMPT], params)
    assert len(output.token_ids) == 100 - len(PROMPT)


def test_target_and_drafter_cannot_change_places(tiny: TinyShelf) -> None:
    with pytest.raises(Refused, match=r"architectures.*DominoDraftModel.*give it as the draft"):
        load(tiny.drafter("domino"))
    with pytest.raises(Refused, match=r"draft architectures.*LlamaForCausalLM.*target"):
        load(tiny.target(), tiny.target())


def test_a_drafter_of_another_target_is_refused(tiny: TinyShelf, tmp_path: Path) -> None:
    config = json.loads((tiny.target() / "config.json").read_text())
    assert config["num_hidden_layers"] == LAYERS
    bigger = TinyTarget("qwen3")
    folder = bigger.save(tmp_path / "other")
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": LAYERS + 1}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused, match=r"num_target_layers.*made for another model"):
        load(folder, tiny.drafter("domino"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"verify_width": 17}, r"verify_width: found 17, wanted 1 to .* block_size 16"),
        ({"verify_width": 0}, r"verify_width: found 0"),
        ({"verify_width": True}, r"verify_width: found True"),
        ({"speculative_domino_candidate_pool_size": -1}, r"pool_size: found -1"),
        ({"speculative_domino_exchange": "half"}, r"exchange: found 'half'"),
        ({"dtype": "int8"}, r"dtype: found 'int8'"),
        ({"tp_size": 0}, r"tp_size: found 0"),
        ({"tp_size": 2.0}, r"tp_size: found 2.0"),
        ({"max_model_len": 1}, r"max_model_len: found 1"),
        ({"max_model_len": 513}, r"max_.*: found (513|512)"),
        ({"kv_memory": 1000}, r"kv_memory: found 1000, wanted at least \d+ bytes"),
        ({"max_model_len": 500, "kv_memory": 1 << 20}, r"kv_memory: found 1048576"),
        ({"device": "tpu"}, r"device: found 'tpu'"),
        ({"page_size": 0}, r"page_size: found 0"),
        ({"speculate": True}, r"setting: found 'speculate', wanted one of .*verify_width"),
    ],
)
def test_settings_are_refused_by_name(
    tiny: TinyShelf, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused, match=message):
        load(tiny.target(), tiny.drafter("domino"), **settings)


def test_a_width_without_a_drafter_is_refused(tiny: TinyShelf) -> None:
    with pytest.raises(Refused, match="verify_width: found 8, wanted 1 where no draft is given"):
        load(tiny.target(), verify_width=8)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, r"prompts?: found \[\]"),
        ("", GREEDY, r"prompt: found ''"),
        ([[1, -1]], GREEDY, r"prompt token id: found -1"),
        ([[1, VOCAB_SIZE]], GREEDY, rf"prompt token id: found {VOCAB_SIZE}, .* {VOCAB_SIZE - 1}"),
        ([[1, 2.5]], GREEDY, r"prompt token id: found 2.5"),
        ([[1] * 512], GREEDY, r"prompt length: found 512, wanted at most 511"),
        ([[1], [2]], [GREEDY], r"sampling_params: found '1 of them', wanted one, or 2"),
        ([{"role": "user"}], GREEDY, r"message content: found None"),
    ],
)
def test_prompts_are_refused_and_the_engine_goes_on(
    tiny: TinyShelf, prompt: Any, params: Any, message: str
) -> None:
    with load(tiny.target(), tiny.drafter("domino")) as llm:
        with pytest.raises(Refused, match=message):
            llm.generate(prompt, params)
        assert len(llm.generate([PROMPT], GREEDY)[0].token_ids) == GREEDY.max_tokens


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, r"max_tokens: found 0"),
        ({"max_tokens": -3}, r"max_tokens: found -3"),
        ({"stop": ""}, r"stop: found ''"),
        ({"stop": ["a", ""]}, r"stop: found ''"),
        ({"temperature": math.nan}, r"temperature: found nan"),
        ({"temperature": -0.1}, r"temperature: found -0.1"),
        ({"top_p": 0.0}, r"top_p: found 0.0"),
        ({"min_p": 1.5}, r"min_p: found 1.5"),
        ({"bad_words": [""]}, r"bad_words: found ''"),
        ({"logprobs": -1}, r"logprobs: found -1"),
        ({"seed": 1 << 63}, r"seed: found"),
    ],
)
def test_sampling_parameters_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        SamplingParams(**fields)


def test_a_closed_engine_says_so(tiny: TinyShelf) -> None:
    llm = load(tiny.target(), tiny.drafter("domino"))
    llm.close()
    llm.close()
    with pytest.raises(Refused, match="closed"):
        llm.generate([PROMPT], GREEDY)


@pytest.mark.parametrize("damage", ["truncated", "no config", "no weights", "not JSON"])
def test_damaged_drafter_files_are_refused(tiny: TinyShelf, tmp_path: Path, damage: str) -> None:
    draft = TinyDrafter(seed=5).save(tmp_path / "draft", tiny.target())
    weights, config = draft / "model.safetensors", draft / "config.json"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "no config":
        config.unlink()
    elif damage == "no weights":
        weights.unlink()
    else:
        config.write_text(config.read_text()[:-3])
    with pytest.raises(Refused):
        load(tiny.target(), draft)


@pytest.mark.parametrize("value", [None, "x", [1], True])
def test_a_field_of_the_wrong_type_is_refused_by_name(
    tiny: TinyShelf, tmp_path: Path, value: Any
) -> None:
    fields = ("hidden_size", "rms_norm_eps", "block_size", "head_dim", "sliding_window")
    for i, field in enumerate(fields):
        draft = changed(tiny.drafter("domino"), tmp_path / str(i), set_config(**{field: value}))
        with pytest.raises(Refused, match=field):
            load(tiny.target(), draft)


def test_quantised_weights_are_refused_by_name(tiny: TinyShelf, tmp_path: Path) -> None:
    """A head that has no plain weight: its parts are named, and the plain weight as missing."""
    folder = TinyTarget("qwen3").save(tmp_path)
    weights = load_file(folder / "model.safetensors")
    head = weights.pop("lm_head.weight")
    weights["lm_head.qweight"] = head.to(torch.int8)
    weights["lm_head.scales"] = torch.ones(len(head))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Refused, match=r"lm_head\.(weight|qweight)"):
        LLM(str(folder), dtype="float32")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_backend": "flash"}, r"attention_backend: found 'flash', wanted auto, torch"),
        ({"mem_fraction_static": 1.5}, r"mem_fraction_static: found 1\.5, wanted a number between"),
        ({"mem_fraction_static": True}, r"mem_fraction_static: found True"),
        ({"device": "tpu"}, r"device: found 'tpu', wanted auto, cpu or cuda"),
        ({"prefill_chunk": 0}, r"prefill_chunk: found 0, wanted an integer of at least 1"),
    ],
)
def test_settings_of_the_gpu_engine_out_of_range(settings, message):
    with pytest.raises(Refused, match=message):
        EngineConfig("model", **settings)


def test_kernels_that_cannot_run_here_are_refused(monkeypatch):
    monkeypatch.setattr("knockon.engine.settle.detect", lambda: CPU_ONLY)
    with pytest.raises(Refused, match=r"attention_backend: found 'triton', wanted torch or auto"):
        settle(EngineConfig("model", attention_backend="triton"))
    with pytest.raises(Refused, match=r"device: found 'cuda', wanted cpu or auto"):
        settle(EngineConfig("model", device="cuda"))


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    one = replace(CPU_ONLY, gpus=(GPU("a GPU", 1 << 36, (9, 0)),))
    monkeypatch.setattr("knockon.engine.settle.detect", lambda: one)
    with pytest.raises(Refused, match=r"tp_size: found 2, wanted at most the 1 GPUs here"):
        settle(EngineConfig("model", tp_size=2))
