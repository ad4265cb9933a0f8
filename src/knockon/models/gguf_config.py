"""What a target is, read from the metadata of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

import torch

from knockon.errors import Refused
from knockon.layers.rotary import RopeConfig
from knockon.models.config import (
    MOST_LAYERS,
    MOST_VALUES,
    ModelConfig,
    extended_positions,
    parse_head_dim,
)
from knockon.models.gguf_header import GGUFHeader

GGUF_ARCHITECTURES = ("llama", "qwen3")
ROPE_DIVISORS = "rope_freqs.weight"  # where converters put Llama 3's scaling

_DTYPES = {"F32": torch.float32, "F16": torch.float16}  # of matrices; quantised ones run in BF16


def parse_gguf(header: GGUFHeader) -> ModelConfig:
    """Read a target's configuration.

    Raises:
        Refused: an unknown architecture, a missing or impossible entry, a missing embedding.
    """
    family = header.architecture
    if family not in GGUF_ARCHITECTURES:
        raise Refused("general.architecture", family, f"one of {sorted(GGUF_ARCHITECTURES)}")
    read = _Metadata(header)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise Refused(f"{header.path}: tensors", "no token_embd.weight", "the token embedding")
    hidden = read.size("embedding_length")
    if embedding.shape[1:] != (hidden,):
        raise Refused(
            f"{header.path}: shape of token_embd.weight", embedding.shape, f"rows of {hidden}"
        )
    heads = read.size("attention.head_count")
    head_dim = parse_head_dim(read.optional("attention.key_length"), hidden, heads)
    values = read.optional("attention.value_length")
    if values not in (None, head_dim):
        raise Refused(f"{family}.attention.value_length", values, f"key_length {head_dim}")
    positions = read.size("context_length")
    layers = read.size("block_count", most=MOST_LAYERS)
    rope = _rope(header, read, head_dim, positions)
    return ModelConfig(
        architecture=family,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=read.size("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read.size("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=read.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        max_positions=extended_positions(rope, positions),
        tie_word_embeddings="output.weight" not in header.tensors,
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in header.tensors,
        eos_token_ids=_eos_ids(header.metadata),
        bos_token_id=header.metadata.get("tokenizer.ggml.bos_token_id"),
        dtype=_DTYPES.get(_matrix_kind(header), torch.bfloat16),
        sliding_windows=(None,) * layers,
    )


def _matrix_kind(header: GGUFHeader) -> str:
    query = header.tensors.get("blk.0.attn_q.weight")
    return query.kind.name if query is not None else ""


def _eos_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """End of sequence, then end of turn where it is another token."""
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    found = tuple(dict.fromkeys(token for token in named if token is not None))
    for token in found:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise Refused("tokenizer.ggml.eos_token_id", token, "a token id")
    return found


def _rope(header: GGUFHeader, read: _Metadata, head_dim: int, positions: int) -> RopeConfig:
    rotated = read.optional("rope.dimension_count")
    if rotated not in (None, head_dim):
        raise Refused(
            f"{header.architecture}.rope.dimension_count", rotated, f"the head size {head_dim}"
        )
    theta = read.number("rope.freq_base")
    kind = read.optional("rope.scaling.type") or "none"
    divisors = _divisors(header, head_dim)
    if kind == "none":
        return RopeConfig(theta, frequency_divisors=divisors)
    if kind == "linear":
        factor = read.number("rope.scaling.factor")
        return RopeConfig(theta, "linear", factor=factor, frequency_divisors=divisors)
    if kind != "yarn":
        raise Refused(
            f"{header.architecture}.rope.scaling.type", kind, "one of ['linear', 'none', 'yarn']"
        )
    for name in ("yarn_ext_factor", "yarn_log_multiplier"):
        if read.optional(f"rope.scaling.{name}") is not None:
            value = read.optional(f"rope.scaling.{name}")
            raise Refused(f"{header.architecture}.rope.scaling.{name}", value, "no such entry")
    factor = read.number("rope.scaling.factor")
    attention = read.optional("rope.scaling.yarn_attn_factor")
    if attention is None:
        attention = read.optional("rope.scaling.attn_factor")
    # llama.cpp multiplies its YaRN scaling of cos and sin by this factor instead of replacing it.
    scaling = None if attention is None else attention * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return RopeConfig(
        theta,
        "yarn",
        factor=factor,
        original_max_positions=read.optional("rope.scaling.original_context_length") or positions,
        beta_fast=read.optional("rope.scaling.yarn_beta_fast") or 32.0,
        beta_slow=read.optional("rope.scaling.yarn_beta_slow") or 1.0,
        attention_factor=scaling,
        frequency_divisors=divisors,
    )


def _divisors(header: GGUFHeader, head_dim: int) -> tuple[float, ...] | None:
    tensor = header.tensors.get(ROPE_DIVISORS)
    if tensor is None:
        return None
    if tensor.shape != (head_dim // 2,) or tensor.kind.name != "F32":
        raise Refused(
            f"{header.path}: {ROPE_DIVISORS}",
            f"{tensor.kind.name} {tensor.shape}",
            f"F32 ({head_dim // 2},)",
        )
    data = header.data[tensor.offset : tensor.offset + tensor.num_bytes]
    return tuple(data.view("<f4").tolist())


class _Metadata:
    """Entries of the architecture's own namespace."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header

    def optional(self, name: str) -> Any:
        return self.header.metadata.get(f"{self.header.architecture}.{name}")

    def size(self, name: str, default: int | None = None, most: int = MOST_VALUES) -> int:
        value = self.optional(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise Refused(
                f"{self.header.architecture}.{name}", value, f"a whole number, 1 to {most}"
            )
        return value

    def number(self, name: str) -> float:
        value = self.optional(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise Refused(
                f"{self.header.architecture}.{name}", value, "a number above 0 and below 1e30"
            )
        return float(value)
