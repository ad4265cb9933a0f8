"""The DFlash backbone: a few Qwen3 layers that denoise one block against the target's features.

Source: DFlash, arXiv 2602.06036. The context's keys and values come from the target's hidden
states, the block's from its own rows; how a row finds the keys it may see is the caller's affair
(pages in the engine, a dense mask in training), so attention is passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knockon.layers.attention import Visibility
from knockon.layers.fused.rotate_and_write import HeadNorm
from knockon.layers.fused.write_context_kv import context_heads
from knockon.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear, Shard
from knockon.layers.norm import RMSNorm
from knockon.layers.rotary import RopeConfig, apply_rotary
from knockon.parallel import Group, HeadShard, deal

Attend = Callable[[int, Tensor], Tensor]
"""``(layer, qkv [B, L, (heads + 2 * kv_heads) * D]) -> [B, L, heads * D]``: a layer's attention
from its fused projection on; :meth:`DraftLayer.turned_heads` says what is done to the heads."""


@dataclass(frozen=True)
class BackboneConfig:
    """Sizes of the backbone.

    Attributes:
        feature_size: width of the concatenated target features, ``len(target_layer_ids) * H``.
        visibility: what a block row sees, one entry a layer.
    """

    hidden_size: int
    feature_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    visibility: tuple[Visibility, ...]

    @property
    def num_layers(self) -> int:
        """Number of draft layers."""
        return len(self.visibility)

    @property
    def kept_per_position(self) -> int:
        """Nothing but keys and values."""
        return 0


class DraftLayer(nn.Module):
    """One Qwen3 layer: norm, attention with per-head q/k norms, norm, gated MLP."""

    def __init__(self, config: BackboneConfig, dtype: torch.dtype, group: Group) -> None:
        super().__init__()
        heads = HeadShard.deal(config.num_heads, config.num_kv_heads, group.size, group.rank)
        dim, eps = config.head_dim, config.rms_norm_eps
        self.heads, self.kv_heads, self.head_dim = heads.head_count, heads.kv_count, dim
        kv = Shard(config.num_kv_heads * dim, heads.kv_start * dim, heads.kv_count * dim)
        q = Shard(config.num_heads * dim, heads.head_start * dim, heads.head_count * dim)
        mlp = Shard(
            config.intermediate_size, *deal(config.intermediate_size, group.size, group.rank)
        )
        hidden = config.hidden_size
        self.input_norm = RMSNorm(hidden, eps, dtype)
        self.qkv = ColumnParallelLinear(hidden, {"q": q, "k": kv, "v": kv}, False, dtype)
        self.q_norm = RMSNorm(dim, eps, dtype)
        self.k_norm = RMSNorm(dim, eps, dtype)
        self.o = RowParallelLinear(q, hidden, dtype, group)
        self.post_norm = RMSNorm(hidden, eps, dtype)
        self.gate_up = ColumnParallelLinear(hidden, {"gate": mlp, "up": mlp}, False, dtype)
        self.down = RowParallelLinear(mlp, hidden, dtype, group)

    def forward(
        self, x: Tensor, normed: Tensor, layer: int, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """The residual stream ``x [B, L, H]`` and its norm, to the stream and what it still lacks.

        The next norm adds that in the same operation.
        """
        x, normed = self.post_norm.add(x, self.o(attend(layer, self.qkv(normed))))
        return x, self.down(self.gate_up.gated(normed))

    def turned_heads(
        self, qkv: Tensor, rotate: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``q``, ``k`` (normed and rotated) and ``v``, ``[B, L, heads, D]``, of the projection."""
        q, k, v = (
            part.reshape(*qkv.shape[:2], -1, self.head_dim)
            for part in qkv.split(self.qkv.sizes, dim=-1)
        )
        return rotate(self.q_norm(q)), rotate(self.k_norm(k)), v

    def head_norms(self) -> HeadNorm:
        """Both norms' weights, a row a head, for :func:`rotate_and_write`."""
        q, k = self.q_norm.weight, self.k_norm.weight
        weight = torch.cat((q.expand(self.heads, -1), k.expand(self.kv_heads, -1)))
        return HeadNorm(weight.detach(), self.q_norm.eps)

    def context_weight(self) -> Tensor:
        """The rows of the fused projection that make keys and values: ``[2 * kv * D, H]``."""
        return self.qkv.weight[self.heads * self.head_dim :]

    def loaders(self) -> dict[str, Callable[[Tensor], None]]:
        """Checkpoint name (within the layer) to the function that takes its full tensor."""
        return {
            "self_attn.q_proj.weight": lambda w: self.qkv.load(w, "q"),
            "self_attn.k_proj.weight": lambda w: self.qkv.load(w, "k"),
            "self_attn.v_proj.weight": lambda w: self.qkv.load(w, "v"),
            "self_attn.o_proj.weight": self.o.load,
            "self_attn.q_norm.weight": self.q_norm.load,
            "self_attn.k_norm.weight": self.k_norm.load,
            "mlp.gate_proj.weight": lambda w: self.gate_up.load(w, "gate"),
            "mlp.up_proj.weight": lambda w: self.gate_up.load(w, "up"),
            "mlp.down_proj.weight": self.down.load,
            "input_layernorm.weight": self.input_norm.load,
            "post_attention_layernorm.weight": self.post_norm.load,
        }


class ProjectedContext(NamedTuple):
    """All draft layers' keys and values before norm and rotation.

    Attributes:
        projected: ``[B, T, layers * 2 * kv_heads * D]``: for each layer its keys, then its values.
        k_norm: ``[layers, D]``, weights of the key heads' norms.
    """

    projected: Tensor
    k_norm: Tensor


class DFlashBackbone(nn.Module):
    """``fc``, ``hidden_norm``, the draft layers and the final ``norm``.

    The features of a verified token depend on nothing in a block, so :meth:`context_kv` is called
    once per verified token and its result is cached by the caller.
    """

    def __init__(self, config: BackboneConfig, dtype: torch.dtype, group: Group) -> None:
        super().__init__()
        self.config = config
        self.fc = ReplicatedLinear(config.feature_size, config.hidden_size, False, dtype)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        layers = [DraftLayer(config, dtype, group) for _ in range(config.num_layers)]
        self.kv_heads = layers[0].kv_heads
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self._fused: tuple[ReplicatedLinear, Tensor] | None = None

    def context_kv(self, features: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that every draft layer takes from verified tokens.

        Args:
            features: ``[B, T, feature_size]``, the target's hidden states at those tokens.
            cos, sin: rotary tables at the tokens' true positions.

        Returns:
            ``k, v`` of ``[B, T, layers, kv_heads, head_dim]``; keys normed and rotated.
        """

        def rotate(heads: Tensor) -> Tensor:
            return apply_rotary(heads, cos, sin)

        context = self.project_context(features)
        return context_heads(
            context.projected, context.k_norm, self.config.rms_norm_eps, rotate, self.kv_heads
        )

    def project_context(self, features: Tensor) -> ProjectedContext:
        """What :meth:`context_kv` makes keys and values of, from the same ``features``."""
        c = self.hidden_norm(self.fc(features))
        if self._fused is not None:
            linear, k_norm = self._fused
            return ProjectedContext(linear(c), k_norm)
        weight, k_norm = self._stack()
        return ProjectedContext(F.linear(c, weight), k_norm)

    def _stack(self) -> tuple[Tensor, Tensor]:
        """All layers' key and value projections as one weight, and their key norms."""
        layers = self.draft_layers()
        weight = torch.cat([layer.context_weight() for layer in layers])
        k_norm = torch.stack([layer.k_norm.weight for layer in layers])
        return weight, k_norm

    def draft_layers(self) -> list[DraftLayer]:
        """The layers, in order."""
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """The block's embeddings ``x [B, L, H]`` to ``Z [B, L, H]``."""
        delta = None
        for index, layer in enumerate(self.draft_layers()):
            x, normed = layer.input_norm.add(x, delta)
            x, delta = layer(x, normed, index, attend)
        return self.norm.add(x, delta)[1]

    def prepare(self) -> None:
        """Make ready for inference: fuse the context projections and repack weights for the CPU.

        The fused copy costs ``layers * 2 * kv_heads * head_dim * H`` elements.
        """
        weight, k_norm = self._stack()
        fused = ReplicatedLinear(weight.shape[1], weight.shape[0], False, weight.dtype)
        fused.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self._fused = (fused, k_norm.detach())
        for module in (fused, *self.modules()):
            if isinstance(module, ReplicatedLinear):
                module.pack()

    def loaders(self) -> dict[str, Callable[[Tensor], None]]:
        """Checkpoint name (spec's "Checkpoint format") to the function that takes its tensor."""
        found: dict[str, Callable[[Tensor], None]] = {
            "fc.weight": self.fc.load,
            "hidden_norm.weight": self.hidden_norm.load,
            "norm.weight": self.norm.load,
        }
        for index, layer in enumerate(self.draft_layers()):
            for name, load in layer.loaders().items():
                found[f"layers.{index}.{name}"] = load
        return found
