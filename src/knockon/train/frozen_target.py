"""The target as training sees it: frozen, whole on one device, many sequences at once.

It shares weights' names and sizes with `knockon.models` but not its forward: here there are no
pages, no ranks and no requests, only dense batches, so each layer is four matrix products and four
fused kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from knockon.errors import Refused
from knockon.layers.rotary import inverse_frequencies
from knockon.models.config import ModelConfig
from knockon.models.gguf_header import is_gguf
from knockon.models.gguf_source import GGUFFile
from knockon.models.safetensors_source import SafetensorsFolder
from knockon.models.target import read_config
from knockon.models.weights import WeightSource
from knockon.train.decode_kernels import add_rms_norm, rope_and_store, silu_mul


@dataclass(frozen=True)
class TargetLayer:
    """Weights of one layer, query, key and value fused, gate and up fused."""

    input_norm: Tensor
    qkv: Tensor
    output: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class FrozenTarget:
    """A Llama-family target in one dtype on one device.

    Args:
        config: its sizes; architecture ``llama`` without attention biases.
        source: where the weights come from, by their Hugging Face names.
        device, dtype: where and in what they are kept.
        max_positions: length of the rotary tables.

    Raises:
        Refused: for an architecture this forward does not compute.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        device: torch.device | str,
        dtype: torch.dtype,
        max_positions: int = 2048,
    ) -> None:
        if config.architecture != "llama" or config.attention_bias or config.mlp_bias:
            raise Refused(
                "architecture", config.architecture, "'llama' without biases, to train from"
            )
        if any(window is not None for window in config.sliding_windows):
            raise Refused("sliding_window", config.sliding_windows, "full attention, to train from")
        if config.rope.rotary_dim(config.head_dim) != config.head_dim:
            raise Refused(
                "partial_rotary_factor", config.rope.partial_rotary_factor, "1.0, to train from"
            )
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype

        def get(name: str) -> Tensor:
            return source.get(name).to(device=self.device, dtype=dtype).contiguous()

        def layer(i: int) -> TargetLayer:
            at = f"model.layers.{i}."
            attention = [get(f"{at}self_attn.{part}_proj.weight") for part in "qkv"]
            mlp = [get(f"{at}mlp.{part}_proj.weight") for part in ("gate", "up")]
            return TargetLayer(
                input_norm=get(at + "input_layernorm.weight"),
                qkv=torch.cat(attention),
                output=get(at + "self_attn.o_proj.weight"),
                post_norm=get(at + "post_attention_layernorm.weight"),
                gate_up=torch.cat(mlp),
                down=get(at + "mlp.down_proj.weight"),
            )

        self.embedding = get("model.embed_tokens.weight")
        self.layers = [layer(i) for i in range(config.num_layers)]
        self.norm = get("model.norm.weight")
        self.lm_head = self.embedding if config.tie_word_embeddings else get("lm_head.weight")
        angles = torch.outer(
            torch.arange(max_positions, dtype=torch.float32),
            inverse_frequencies(config.rope, config.head_dim),
        )
        scaling = config.rope.attention_scaling()
        self.cos = (angles.cos() * scaling).to(self.device)
        self.sin = (angles.sin() * scaling).to(self.device)

    @classmethod
    def load(
        cls, path: Path, device: torch.device | str, dtype: torch.dtype, max_positions: int = 2048
    ) -> FrozenTarget:
        """From a Hugging Face folder or a GGUF file."""
        source: WeightSource = GGUFFile(path, dtype) if is_gguf(path) else SafetensorsFolder(path)
        return cls(read_config(path), source, device, dtype, max_positions)

    def forward(
        self,
        tokens: Tensor,
        feature_layers: tuple[int, ...] = (),
        cache: tuple[Tensor, Tensor] | None = None,
        slots: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """All rows of right-padded sequences from position 0, causal.

        Args:
            tokens: ``[b, T]`` int64. Padding is at the right, where causality hides it from what is
                real.
            feature_layers: layers after which the residual stream is kept.
            cache, slots: where given, keys and values of layer ``i`` go to ``cache[*][i, slots, :,
                :T]``.

        Returns:
            Hidden states after the final norm ``[b, T, H]`` and features ``[b, T,
            len(feature_layers) * H]``.
        """
        config = self.config
        batch, length = tokens.shape
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        rows = batch * length
        positions = torch.arange(length, device=self.device).repeat(batch)
        offsets = torch.arange(rows, device=self.device) * (kv_heads * dim)
        residual = F.embedding(tokens.reshape(-1), self.embedding)
        kept: dict[int, Tensor] = {}
        update: Tensor | None = None
        for index, layer in enumerate(self.layers):
            x = add_rms_norm(update, residual, layer.input_norm, config.rms_norm_eps)
            if index - 1 in feature_layers:
                kept[index - 1] = residual.clone()
            qkv = F.linear(x, layer.qkv)
            keys = qkv.new_empty(batch, length, kv_heads, dim)
            values = torch.empty_like(keys)
            query = rope_and_store(
                qkv, positions, self.cos, self.sin, heads, keys, values, offsets, dim
            )
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
            if cache is not None and slots is not None:
                cache[0][index, slots, :, :length] = keys
                cache[1][index, slots, :, :length] = values
            out = F.scaled_dot_product_attention(
                query.view(batch, length, heads, dim).transpose(1, 2),
                keys,
                values,
                is_causal=True,
                enable_gqa=True,
            )
            update = F.linear(out.transpose(1, 2).reshape(rows, heads * dim), layer.output)
            x = add_rms_norm(update, residual, layer.post_norm, config.rms_norm_eps)
            update = F.linear(silu_mul(F.linear(x, layer.gate_up)), layer.down)
        hidden = add_rms_norm(update, residual, self.norm, config.rms_norm_eps).view(
            batch, length, -1
        )
        features = [kept[i].view(batch, length, -1) for i in feature_layers]
        return hidden, torch.cat(features, -1) if features else hidden[..., :0]
