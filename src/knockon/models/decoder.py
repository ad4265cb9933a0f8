"""A dense pre-norm decoder, tensor-parallel: what the Llama and Qwen3 families share.

Attention heads are dealt to ranks by whole KV groups, the MLP's inner dimension in equal parts, the
vocabulary by rows. Each layer costs two all-reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from knockon.layers.attention import AttentionBackend, BlockPlan, SdpaBackend
from knockon.layers.delta_rule import DeltaChunks
from knockon.layers.embedding import LMHead, VocabParallelEmbedding
from knockon.layers.linear import ReplicatedLinear
from knockon.layers.norm import RMSNorm
from knockon.layers.rotary import RotaryEmbedding, Rotation
from knockon.models.config import ModelConfig
from knockon.models.decoder_layer import DecoderLayer, LayerMemory, MemorySizes
from knockon.models.gated_delta_net import GatedDeltaNet
from knockon.models.strict import Loader
from knockon.parallel import Group, HeadShard, VocabShard

# Makes a layer of a configuration, by its number.
LayerMaker = Callable[[ModelConfig, int, HeadShard, torch.dtype, Group], DecoderLayer]

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


class Decoder(nn.Module):
    """A target model: embedding, layers, final norm, LM head.

    Args:
        config: what the model is.
        layer: makes the family's layers.
        dtype: of weights and activations.
        group: the ranks that share it.
        max_positions: rows of the rotary tables.
        device: where the weights live.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerMaker,
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
            self.norm = RMSNorm(
                config.hidden_size, config.rms_norm_eps, dtype, config.zero_centred_norms
            )
            self.lm_head = _head(config, self.embedding)

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Layers that keep KV, KV heads on this rank, head size."""
        return self.config.num_attention_layers, self.heads.kv_count, self.config.head_dim

    def allocate(
        self, positions: int, states: int = 0, state_dtype: torch.dtype = torch.float32
    ) -> list[LayerMemory]:
        """What every layer keeps of requests, zeroed: KV of so many slots, or so many states."""
        sizes = MemorySizes(positions, self.kv_dtype, states, state_dtype, self.device)
        return [layer.allocate(sizes) for layer in self.decoder_layers()]

    def forward(
        self,
        token_ids: Tensor,
        plan: BlockPlan,
        kv: Sequence[LayerMemory],
        feature_layers: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Run rows through the model, writing their keys and values.

        Args:
            token_ids: ``[B, T]`` int64.
            plan: where the rows stand, and whose states they have where layers are recurrent.
            kv: one entry a layer, as :meth:`allocate` makes them.
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

    def prefill_by(self, chunks: DeltaChunks) -> None:
        """What takes prompts in where layers are recurrent; other layers know of none."""
        for module in self.modules():
            if isinstance(module, GatedDeltaNet):
                module.chunks = chunks

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
