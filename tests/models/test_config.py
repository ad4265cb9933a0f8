"""A config.json becomes a ModelConfig, or is refused by the name of what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from knockon.errors import Refused
from knockon.models.config import parse_hf

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "bos_token_id": 1,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}


def test_sizes_and_flags_are_read() -> None:
    config = parse_hf(LLAMA)
    assert (config.architecture, config.head_dim, config.dtype) == ("llama", 8, torch.bfloat16)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False,) * 3
    assert config.sliding_windows == (None,) * 3
    assert parse_hf(QWEN3).head_dim == 16
    assert parse_hf(LLAMA | {"num_key_value_heads": None}).num_kv_heads == 6


def test_end_of_sequence_ids_come_from_both_files() -> None:
    config = parse_hf(LLAMA | {"eos_token_id": [2, 7]}, {"eos_token_id": [9, 2]})
    assert config.eos_token_ids == (9, 2, 7)
    assert parse_hf(LLAMA | {"eos_token_id": None}).eos_token_ids == ()


def test_a_llama_without_base_has_the_documented_one_and_a_qwen3_none() -> None:
    without = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    assert parse_hf(without).rope.theta == 10000.0
    with pytest.raises(Refused, match="rope_theta"):
        parse_hf(without | {"architectures": ["Qwen3ForCausalLM"]})


def test_yarn_extends_the_positions() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert parse_hf(LLAMA | {"rope_scaling": scaling}).max_positions == 128


def test_sliding_windows_follow_layer_types_or_max_window_layers() -> None:
    sliding = QWEN3 | {"use_sliding_window": True, "sliding_window": 16}
    assert parse_hf(sliding | {"max_window_layers": 2}).sliding_windows == (None, None, 16)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert parse_hf(sliding | {"layer_types": types}).sliding_windows == (16, None, 16)
    off = sliding | {"use_sliding_window": False, "max_window_layers": 0}
    assert parse_hf(off).sliding_windows == (None,) * 3


@pytest.mark.parametrize("name", ["DFlashDraftModel", "DominoDraftModel"])
def test_a_drafter_given_as_a_target_is_refused_as_one(name: str) -> None:
    with pytest.raises(Refused, match=f"{name}.*drafter"):
        parse_hf(QWEN3 | {"architectures": [name]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "Mamba.*LlamaForCausalLM.*Qwen3ForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method: found 'gptq'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_size": 50}, "num_attention_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"dtype": "int8", "torch_dtype": None}, "dtype of config.json"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["sliding_attention"] * 3}, "use_sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 4}, "max_window_layers"),
    ],
)
def test_what_is_wrong_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        parse_hf(LLAMA | change)
