"""A target and a Domino drafter in the published formats, of any size, with random weights.

Their proposals mean nothing, but they are many: the draft layer's attention is sharp and strong, so
that every row of every block is another. Corrections outweigh base logits, so that a pool of 2048
cuts off much of what would have won.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class RandomCheckpoint:
    """Sizes of both; the weights are BF16, as published.

    Attributes:
        base_spread, correction_spread: about the standard deviation of base logits and corrections.
    """

    vocab_size: int = 5003
    hidden_size: int = 64
    gru_size: int = 48
    correction_size: int = 32
    block_size: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    inner: int = 128
    prefix_len: int = 1
    shift_label: bool = False
    base_spread: float = 3.0
    correction_spread: float = 6.0
    seed: int = 0

    def save(self, folder: Path) -> tuple[Path, Path]:
        """Write ``folder/target`` and ``folder/draft``; their paths."""
        rng = torch.Generator().manual_seed(self.seed)
        target = _write(folder / "target", self._target_config(), self._target_weights(rng))
        draft = _write(folder / "draft", self._draft_config(), self._draft_weights(rng))
        return target, draft

    def _layer_sizes(self) -> dict[str, Any]:
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 256,
            "rope_theta": 10000.0,
            "dtype": "bfloat16",
        }

    def _target_config(self) -> dict[str, Any]:
        return self._layer_sizes() | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "tie_word_embeddings": False,
            "eos_token_id": 0,
        }

    def _draft_config(self) -> dict[str, Any]:
        return self._layer_sizes() | {
            "architectures": ["DominoDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": 1,
            "layer_types": ["full_attention"],
            "block_size": self.block_size,
            "num_target_layers": 2,
            "dflash_config": {
                "mask_token_id": 1,
                "target_layer_ids": [0],
                "projector_type": "domino",
                "pure_draft_prefix_len": self.prefix_len,
                "gru_hidden_dim": self.gru_size,
                "emb_dim": self.correction_size,
                "shift_label": self.shift_label,
            },
        }

    def _target_weights(self, rng: torch.Generator) -> dict[str, Tensor]:
        weights = {
            "model.embed_tokens.weight": _normal(rng, self.vocab_size, self.hidden_size, 1.0),
            "model.norm.weight": torch.ones(self.hidden_size),
            "lm_head.weight": _normal(
                rng, self.vocab_size, self.hidden_size, self.base_spread / self.hidden_size**0.5
            ),
        }
        for layer in range(2):
            weights |= self._layer(rng, f"model.layers.{layer}.")
        return weights

    def _draft_weights(self, rng: torch.Generator) -> dict[str, Tensor]:
        hidden, gru, correction = self.hidden_size, self.gru_size, self.correction_size
        return {
            "fc.weight": _normal(rng, hidden, hidden),
            "hidden_norm.weight": torch.ones(hidden),
            "norm.weight": torch.ones(hidden),
            **self._layer(rng, "layers.0."),
            "prefix_gru.weight_ih_l0": _normal(rng, 3 * gru, hidden, 1.5 / hidden**0.5),
            "prefix_gru.weight_hh_l0": _normal(rng, 3 * gru, gru, 1.5 / gru**0.5),
            "embed_proj.0.weight": _normal(rng, correction, hidden + gru, 1.5 / hidden**0.5),
            "embed_proj.2.weight": _normal(
                rng, self.vocab_size, correction, self.correction_spread / correction**0.5
            ),
        }

    def _layer(self, rng: torch.Generator, prefix: str) -> dict[str, Tensor]:
        hidden, q, kv = (
            self.hidden_size,
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
        )
        weights = {
            "self_attn.q_proj": _normal(rng, q, hidden),
            "self_attn.k_proj": _normal(rng, kv, hidden),
            "self_attn.v_proj": _normal(rng, kv, hidden),
            "self_attn.o_proj": _normal(rng, hidden, q, 4 / q**0.5),
            "self_attn.q_norm": torch.full((self.head_dim,), 3.0),
            "self_attn.k_norm": torch.ones(self.head_dim),
            "mlp.gate_proj": _normal(rng, self.inner, hidden),
            "mlp.up_proj": _normal(rng, self.inner, hidden),
            "mlp.down_proj": _normal(rng, hidden, self.inner),
            "input_layernorm": torch.ones(hidden),
            "post_attention_layernorm": torch.ones(hidden),
        }
        return {f"{prefix}{name}.weight": weight for name, weight in weights.items()}


def _normal(rng: torch.Generator, rows: int, columns: int, scale: float | None = None) -> Tensor:
    scale = columns**-0.5 if scale is None else scale
    return torch.randn(rows, columns, generator=rng) * scale


def _write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    rounded = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    save_file(rounded, folder / "model.safetensors")
    return folder
