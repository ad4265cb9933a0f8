"""Write a transformers model as a GGUF file, laid out as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedModel

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, stem = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[stem]}.{suffix}"
    return f"{_NAMES[stem]}.{suffix}"


def interleave(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The converter's ``permute`` of Llama query and key rows."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    leave_out: str = "",
    metadata: dict[str, str] | None = None,
    divisors: np.ndarray[Any, Any] | None = None,
) -> Path:
    """Write ``model``; matrices are stored as ``kind``, vectors as F32."""
    config = model.config
    family = config.model_type
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    for key, value in (metadata or {}).items():
        writer.add_string(key, value)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    for name, parameter in model.named_parameters():
        rows = parameter.detach().numpy()
        if family == "llama" and ".q_proj." in name:
            rows = interleave(rows, config.num_attention_heads)
        if family == "llama" and ".k_proj." in name:
            rows = interleave(rows, config.num_key_value_heads)
        theirs = gguf_name(name)
        if theirs == leave_out:
            continue
        if rows.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(theirs, np.ascontiguousarray(rows))
        else:
            writer.add_tensor(theirs, gguf.quants.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
