"""A dense pre-norm decoder, tensor-parallel: what the Llama and Qwen3 families share.

Attention heads are dealt to ranks by whole KV groups, the MLP's inner dimension in equal parts, the
vocabulary by rows. Each layer costs two all-reduces.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from knockon.layers.attention import AttentionBackend, BlockPlan, PagedKV, SdpaBackend, Visibility
from knockon.layers.embedding import LMHead, VocabParallelEmbedding
from knockon.layers.fused.rotate_and_write import HeadNorm, rotate_and_write
from knockon.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear, Shard
from knockon.layers.norm import RMSNorm
from knockon.layers.rotary import RotaryEmbedding, Rotation
from knockon.models.config import ModelConfig
from knockon.models.strict import Loader
from knockon.parallel import Group, HeadShard, VocabShard, deal

# Asked for as a feature layer: the hidden state after the final norm.
FINAL_HIDDEN = -1


class TargetOutput(NamedTuple):
    """What one forward of a target yields.

    Attributes:
        hidden: ``[B, T, H]`` after the final norm.
        features: ``[B, T, len(feature_layers) * H]``, the residual stream after each of those
            layers (``hidden`` for ``FINAL_HIDDEN``), in the order asked for; ``None`` if none were.
    """

    hidden: Tensor
    features: Tensor | None


class DecoderLayer(nn.Module):
    """Attention and MLP of one layer. A family overrides what it does differently."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        heads: HeadShard,
        dtype: torch.dtype,
        group: Group,
    ) -> None:
        super().__init__()
        size, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.heads = heads
        self.head_dim = dim
        self.visibility = Visibility(True, config.sliding_windows[index])
        q = Shard(heads.num_heads * dim, heads.head_start * dim, heads.head_count * dim)
        k = Shard(heads.num_kv_heads * dim, heads.kv_start * dim, heads.kv_count * dim)
        inner = Shard(
            config.intermediate_size, *deal(config.intermediate_size, group.size, group.rank)
        )
        self.input_norm = RMSNorm(size, config.rms_norm_eps, dtype)
        self.qkv = ColumnParallelLinear(size, {"q": q, "k": k, "v": k}, bias, dtype)
        self.output = RowParallelLinear(q, size, dtype, group, bias)
        self.mlp_norm = RMSNorm(size, config.rms_norm_eps, dtype)
        parts = {"gate": inner, "up": inner}
        self.gate_up = ColumnParallelLinear(size, parts, config.mlp_bias, dtype)
        self.down = RowParallelLinear(inner, size, dtype, group, config.mlp_bias)

    def forward(
        self,
        x: Tensor,
        normed: Tensor,
        rotation: Rotation,
        kv: PagedKV,
        plan: BlockPlan,
        attention: AttentionBackend,
    ) -> tuple[Tensor, Tensor]:
        """One layer, between two norms of the residual stream.

        Args:
            x: the residual stream ``[B, T, H]``; left as it is.
            normed: ``input_norm`` of it.
            rotation: rotary embedding at the rows' positions.

        Returns:
            The stream and what is still to be added to it: the next norm does both in one.
        """
        qkv = self.qkv(normed)
        q = rotate_and_write(qkv, rotation, plan.slots, kv, self.head_norms())
        attended = attention.attend(q, kv, plan, self.visibility)
        x, normed = self.mlp_norm.add(x, self.output(attended))
        return x, self.down(self.gate_up.gated(normed))

    def head_norms(self) -> HeadNorm | None:
        """How query and key heads are normed before rotation: here, not at all."""
        return None

    def loaders(self) -> dict[str, Loader]:
        """How each checkpoint tensor of the layer is loaded, by its name within the layer."""
        loaders: dict[str, Loader] = {
            "input_layernorm.weight": self.input_norm.load,
            "post_attention_layernorm.weight": self.mlp_norm.load,
        }
        for part in ("q", "k", "v"):
            loaders |= _column_loaders(f"self_attn.{part}_proj", self.qkv, part)
        for part in ("gate", "up"):
            loaders |= _column_loaders(f"mlp.{part}_proj", self.gate_up, part)
        return (
            loaders
            | _row_loaders("self_attn.o_proj", self.output, self.qkv.bias is not None)
            | _row_loaders("mlp.down_proj", self.down, self.gate_up.bias is not None)
        )


class Decoder(nn.Module):
    """A target model: embedding, layers, final norm, LM head.

    Args:
        config: what the model is.
        layer: the family's layer.
        dtype: of weights and activations.
        group: the ranks that share it.
        max_positions: rows of the rotary tables.
        device: where the weights live.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: type[DecoderLayer],
        dtype: torch.dtype,
        group: Group,
        max_positions: int,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config = config
        self.group = group
        self.dtype = dtype
        self.kv_dtype = dtype  # the engine may ask for another
        self.device = torch.device(device)
        self.heads = HeadShard.deal(config.num_heads, config.num_kv_heads, group.size, group.rank)
        self.vocab_shard = VocabShard.deal(config.vocab_size, group.size, group.rank)
        self.attention: AttentionBackend = SdpaBackend()
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, max_positions, device)
        with torch.device(device):
            self.embedding = VocabParallelEmbedding(
                config.hidden_size, self.vocab_shard, dtype, group
            )
            self.layers = nn.ModuleList(
                layer(config, index, self.heads, dtype, group) for index in range(config.num_layers)
            )
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
            self.lm_head = _head(config, self.embedding)

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Layers, KV heads on this rank, head size: what paged KV must be allocated for."""
        return self.config.num_layers, self.heads.kv_count, self.config.head_dim

    def forward(
        self,
        token_ids: Tensor,
        plan: BlockPlan,
        kv: list[PagedKV],
        feature_layers: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Run rows through the model, writing their keys and values.

        Args:
            token_ids: ``[B, T]`` int64.
            plan: where the rows stand.
            kv: one entry a layer.
            feature_layers: 0-based layers after which the residual stream is kept, or
                ``FINAL_HIDDEN``.
        """
        rotation = Rotation(self.rotary, plan.positions)
        layers = self.decoder_layers()
        norms = [*(layer.input_norm for layer in layers), self.norm]
        kept: dict[int, Tensor] = {}
        x, normed = norms[0].add(self.embedding(token_ids), None)
        for index, layer in enumerate(layers):
            x, delta = layer(x, normed, rotation, kv[index], plan, self.attention)
            x, normed = norms[index + 1].add(x, delta)
            if index in feature_layers:
                kept[index] = x
        kept[FINAL_HIDDEN] = normed
        features = torch.cat([kept[i] for i in feature_layers], -1) if feature_layers else None
        return TargetOutput(normed, features)

    def decoder_layers(self) -> list[DecoderLayer]:
        """The layers, in order."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings ``[..., H]`` of ``ids [...]``."""
        embedded: Tensor = self.embedding(ids)
        return embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[..., V]`` of ``hidden [..., H]``, in the head's dtype, equal on every rank."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def pack(self) -> None:
        """Repack the linears for CPU inference, once loaded; elsewhere nothing changes."""
        for module in self.modules():
            if isinstance(module, ReplicatedLinear | LMHead):
                module.pack()

    def loaders(self) -> dict[str, Loader]:
        """How each checkpoint tensor is loaded, by its Hugging Face name."""
        loaders: dict[str, Loader] = {
            "model.embed_tokens.weight": self.embedding.load,
            "model.norm.weight": self.norm.load,
        }
        if not self.config.tie_word_embeddings:
            loaders["lm_head.weight"] = self.lm_head.load
        for index, layer in enumerate(self.decoder_layers()):
            for name, load in layer.loaders().items():
                loaders[f"model.layers.{index}.{name}"] = load
        return loaders


def _head(config: ModelConfig, embedding: VocabParallelEmbedding) -> LMHead:
    """The LM head; a tied one is built without memory of its own."""
    shard, dtype, group = embedding.shard, embedding.weight.dtype, embedding.group
    if not config.tie_word_embeddings:
        return LMHead(config.hidden_size, shard, dtype, group)
    with torch.device("meta"):
        head = LMHead(config.hidden_size, shard, dtype, group)
    head.tie(embedding)
    return head


def _column_loaders(name: str, linear: ColumnParallelLinear, part: str) -> dict[str, Loader]:
    def weight(full: Tensor) -> None:
        linear.load(full, part)

    def bias(full: Tensor) -> None:
        linear.load(full, part, bias=True)

    if linear.bias is None:
        return {f"{name}.weight": weight}
    return {f"{name}.weight": weight, f"{name}.bias": bias}


def _row_loaders(name: str, linear: RowParallelLinear, has_bias: bool) -> dict[str, Loader]:
    def bias(full: Tensor) -> None:
        linear.load(full, bias=True)

    if not has_bias:
        return {f"{name}.weight": linear.load}
    return {f"{name}.weight": linear.load, f"{name}.bias": bias}
