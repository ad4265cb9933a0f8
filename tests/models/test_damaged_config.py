"""Whatever stands in a field of a configuration, it is accepted or refused; nothing else."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from knockon.drafters.config import parse_draft_config
from knockon.drafters.mtp_config import is_mtp, parse_mtp_config
from knockon.errors import Refused
from knockon.models.config import parse_hf

JUNK: tuple[Any, ...] = (
    *(None, 0, -1, 2**40, 10**400, 1.5, math.nan, math.inf, -math.inf, True, "x", ""),
    *([], ["x"], [["a"]], {}, {"a": 1}, {"type": []}, [None]),
)
TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0},
    **dict.fromkeys(("rope_scaling", "quantization_config", "layer_types", "sliding_window")),
    **dict.fromkeys(("use_sliding_window", "max_window_layers", "dtype", "torch_dtype")),
    **dict.fromkeys(("eos_token_id", "tie_word_embeddings", "partial_rotary_factor")),
}
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": {
        **{k: v for k, v in TARGET.items() if v is not None},
        "architectures": None,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        "rope_scaling": None,
    },
    **dict.fromkeys(("dtype", "torch_dtype", "quantization_config", "eos_token_id")),
}
DRAFT: dict[str, Any] = {
    **{k: v for k, v in TARGET.items() if v is not None},
    "architectures": ["DominoDraftModel"],
    "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
    "sliding_window": 8,
    "block_size": 16,
    "num_target_layers": 4,
    "dflash_config": {
        "mask_token_id": 3,
        "target_layer_ids": [0, 2],
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "gru_hidden_dim": 8,
        "emb_dim": 8,
        "shift_label": True,
        "causal": False,
    },
}


def fields(config: dict[str, Any]) -> list[tuple[str, ...]]:
    nested = [(k, inner) for k, v in config.items() if isinstance(v, dict) for inner in v]
    return [(name,) for name in config] + nested


@pytest.mark.parametrize(
    ("parse", "config"),
    [
        (parse_hf, TARGET),
        (parse_hf, HYBRID),
        (parse_mtp_config, HYBRID),
        (is_mtp, HYBRID),
        (parse_draft_config, DRAFT),
    ],
)
def test_junk_in_any_field_is_accepted_or_refused(parse: Any, config: dict[str, Any]) -> None:
    parse(config)
    for field in fields(config):
        for junk in JUNK:
            damaged = copy.deepcopy(config)
            inner = damaged[field[0]] if len(field) == 2 else damaged
            inner[field[-1]] = junk
            try:
                parse(damaged)
            except Refused:
                continue
            except Exception as error:
                pytest.fail(f"{'.'.join(field)} = {junk!r}: {error!r}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rms_norm_eps", math.nan),
        ("num_hidden_layers", 2**40),
        ("max_position_embeddings", 2**40),
        ("head_dim", 2**40),
        ("quantization_config", "gptq"),
        ("architectures", [["LlamaForCausalLM"]]),
    ],
)
def test_values_that_would_fail_later_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(Refused, match=field):
        parse_hf({**TARGET, field: value})
