"""Qwen3.5 and 3.6 (dense, text): gated delta net layers, and some of gated attention.

Norms are zero-centred (they multiply by ``1 + weight``), rotation turns a part of each head, and
attention's output is gated by what the query projection brings along.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from knockon.errors import Refused
from knockon.layers.attention import AttentionBackend, BlockPlan, PagedKV
from knockon.layers.fused.rotate_and_write import rotate_and_write
from knockon.layers.recurrent_state import DeltaMemory
from knockon.layers.rotary import Rotation
from knockon.models.config import ModelConfig
from knockon.models.decoder_layer import DecoderLayer, LayerMemory, MemorySizes
from knockon.models.gated_delta_net import GatedDeltaNet
from knockon.models.qwen3 import Qwen3Layer
from knockon.models.strict import Loader
from knockon.parallel import Group, HeadShard


class Qwen35AttentionLayer(Qwen3Layer):
    """Qwen3's layer with a sigmoid gate on what attention gives."""

    output_gate = True

    def mix(
        self,
        normed: Tensor,
        rotation: Rotation,
        memory: LayerMemory,
        plan: BlockPlan,
        attention: AttentionBackend,
    ) -> Tensor:
        """Attention over the context and the block's own rows, gated."""
        kv = cast(PagedKV, memory)
        projected = self.qkv(normed)
        q = self.place(projected, rotation, kv, plan.slots)
        gate = projected[..., -self.qkv.sizes[-1] :].sigmoid()
        mixed: Tensor = self.output(attention.attend(q, kv, plan, self.visibility) * gate)
        return mixed

    def place(self, qkv: Tensor, rotation: Rotation, kv: PagedKV, slots: Tensor) -> Tensor:
        """As ever; the gate lies behind the values."""
        heads = qkv[..., : -self.qkv.sizes[-1]]
        return rotate_and_write(heads, rotation, slots, kv, self.head_norms())

    def loaders(self) -> dict[str, Loader]:
        """The shared ones; the query projection holds queries and gate, head by head."""

        def weight(full: Tensor) -> None:
            for part, rows in self._part_heads(full).items():
                self.qkv.load(rows, part)

        def bias(full: Tensor) -> None:
            for part, rows in self._part_heads(full).items():
                self.qkv.load(rows, part, bias=True)

        loaders = super().loaders() | {"self_attn.q_proj.weight": weight}
        return loaders if self.qkv.bias is None else loaders | {"self_attn.q_proj.bias": bias}

    def _part_heads(self, full: Tensor) -> dict[str, Tensor]:
        heads, dim = self.heads.num_heads, self.head_dim
        if full.shape[0] != 2 * heads * dim:
            raise Refused("weight rows", full.shape[0], f"{2 * heads * dim}, queries and gate")
        q, gate = full.unflatten(0, (heads, 2, dim)).unbind(1)
        return {"q": q.flatten(0, 1), "gate": gate.flatten(0, 1)}


class DeltaLayer(DecoderLayer):
    """A layer that mixes tokens by a recurrence."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        heads: HeadShard,
        dtype: torch.dtype,
        group: Group,
    ) -> None:
        super().__init__(config, index, heads, dtype, group)
        assert config.delta is not None
        self.mixer = GatedDeltaNet(
            config.delta, config.hidden_size, config.rms_norm_eps, dtype, group
        )

    def mix(
        self,
        normed: Tensor,
        rotation: Rotation,
        memory: LayerMemory,
        plan: BlockPlan,
        attention: AttentionBackend,
    ) -> Tensor:
        """The recurrence; positions do not enter it."""
        mixed: Tensor = self.mixer(normed, cast(DeltaMemory, memory), plan)
        return mixed

    def allocate(self, sizes: MemorySizes) -> DeltaMemory:
        """So many states."""
        return self.mixer.allocate(sizes.states, sizes.state_dtype, sizes.device)

    def loaders(self) -> dict[str, Loader]:
        """The shared ones and the mixer's."""
        own = self.mixer.loaders().items()
        return super().loaders() | {f"linear_attn.{name}": load for name, load in own}


def qwen3_5_layer(
    config: ModelConfig, index: int, heads: HeadShard, dtype: torch.dtype, group: Group
) -> DecoderLayer:
    """The layer that a configuration has in that place."""
    kind = DeltaLayer if config.is_recurrent(index) else Qwen35AttentionLayer
    return kind(config, index, heads, dtype, group)
