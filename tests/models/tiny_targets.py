"""Tiny random targets: transformers' model as the oracle, and how ours is run beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config
from transformers import Qwen3ForCausalLM as Qwen3Model

from knockon.layers.attention import PagedKV, plan_block
from knockon.models.decoder import Decoder, TargetOutput

PAGE_SIZE = 4

_SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def rope(kind: str = "default", theta: float = 10000.0, **settings: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **settings}}


_LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
_YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("llama", {"tie_word_embeddings": True, **rope()}),
    "llama, wide heads, biases, linear": (
        "llama",
        {"head_dim": 12, "attention_bias": True, "mlp_bias": True, **rope("linear", factor=2.0)},
    ),
    "llama, one KV head, llama3": ("llama", {"num_key_value_heads": 1, **_LLAMA3}),
    "llama, every head its own, yarn": ("llama", {"num_key_value_heads": 6, **_YARN}),
    "qwen3": ("qwen3", {"head_dim": 16, **rope(theta=1e6)}),
    "qwen3, tied, biases, yarn": (
        "qwen3",
        {"head_dim": 10, "tie_word_embeddings": True, "attention_bias": True, **_YARN},
    ),
    "qwen3, one KV head": ("qwen3", {"head_dim": 8, "num_key_value_heads": 1, **rope()}),
    "qwen3, sliding windows": (
        "qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
        | rope(),
    ),
}


def make_reference(family: str, settings: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A transformers model with random weights, norms and biases included."""
    torch.manual_seed(seed)
    sizes = _SIZES | settings
    model: PreTrainedModel
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        model = Qwen3Model(Qwen3Config(**sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.2 if name.endswith("bias") else parameter.shape[-1] ** -0.5
            parameter.normal_(0, scale)
            if "norm" in name:
                parameter.add_(1.0)
    return model.eval()


def make_kv(model: Decoder, batch: int, positions: int) -> tuple[list[PagedKV], Tensor]:
    """Paged KV for ``batch`` requests and their page table, pages interleaved between requests."""
    pages = -(-positions // PAGE_SIZE)
    layers, kv_heads, dim = model.kv_shape
    slots = (batch * pages + 1) * PAGE_SIZE
    kv = [PagedKV.allocate(slots, kv_heads, dim, model.dtype) for _ in range(layers)]
    return kv, torch.arange(1, batch * pages + 1).view(pages, batch).T.contiguous()


def run_chunks(
    model: Decoder, ids: Tensor, chunks: list[int], feature_layers: tuple[int, ...] = ()
) -> TargetOutput:
    """Run ``ids [B, T]`` in forwards of so many rows each, and put the outputs together."""
    kv, page_table = make_kv(model, *ids.shape)
    hidden, features = [], []
    start = 0
    for rows in chunks:
        starts = torch.full((ids.shape[0],), start)
        plan = plan_block(page_table, PAGE_SIZE, starts, rows, start + rows)
        out = model(ids[:, start : start + rows], plan, kv, feature_layers)
        hidden.append(out.hidden)
        if out.features is not None:
            features.append(out.features)
        start += rows
    return TargetOutput(torch.cat(hidden, 1), torch.cat(features, 1) if features else None)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """max |difference| over max |expected|."""
    return float((found - expected).abs().max() / expected.abs().max())
