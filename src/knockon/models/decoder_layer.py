"""One layer of a pre-norm decoder, tensor-parallel: two norms, an MLP, and what mixes tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from knockon.layers.attention import AttentionBackend, BlockPlan, PagedKV, Visibility
from knockon.layers.fused.rotate_and_write import HeadNorm, rotate_and_write
from knockon.layers.linear import ColumnParallelLinear, RowParallelLinear, Shard
from knockon.layers.norm import RMSNorm
from knockon.layers.recurrent_state import DeltaMemory
from knockon.layers.rotary import Rotation
from knockon.models.config import ModelConfig
from knockon.models.strict import Loader
from knockon.parallel import Group, HeadShard, deal

# What a layer keeps of requests: keys and values in pages, or states by slot.
LayerMemory = PagedKV | DeltaMemory


class MemorySizes(NamedTuple):
    """How much every layer is to keep, and in what.

    Attributes:
        positions: slots of keys and values. states: slots of states.
    """

    positions: int
    kv_dtype: torch.dtype
    states: int
    state_dtype: torch.dtype
    device: torch.device


class DecoderLayer(nn.Module, ABC):
    """What mixes tokens, and an MLP, each behind its norm."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        heads: HeadShard,
        dtype: torch.dtype,
        group: Group,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        inner = Shard(
            config.intermediate_size, *deal(config.intermediate_size, group.size, group.rank)
        )
        self.input_norm = RMSNorm(size, eps, dtype, config.zero_centred_norms)
        self.mlp_norm = RMSNorm(size, eps, dtype, config.zero_centred_norms)
        parts = {"gate": inner, "up": inner}
        self.gate_up = ColumnParallelLinear(size, parts, config.mlp_bias, dtype)
        self.down = RowParallelLinear(inner, size, dtype, group, config.mlp_bias)

    @abstractmethod
    def mix(
        self,
        normed: Tensor,
        rotation: Rotation,
        memory: LayerMemory,
        plan: BlockPlan,
        attention: AttentionBackend,
    ) -> Tensor:
        """Every row from those before it: ``[B, T, H]``, to be added to the residual stream."""

    @abstractmethod
    def allocate(self, sizes: MemorySizes) -> LayerMemory:
        """What the layer keeps of requests, zeroed."""

    def forward(
        self,
        x: Tensor,
        normed: Tensor,
        rotation: Rotation,
        memory: LayerMemory,
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
        mixed = self.mix(normed, rotation, memory, plan, attention)
        x, normed = self.mlp_norm.add(x, mixed)
        return x, self.down(self.gate_up.gated(normed))

    def loaders(self) -> dict[str, Loader]:
        """How each checkpoint tensor of the layer is loaded, by its name within the layer."""
        loaders: dict[str, Loader] = {
            "input_layernorm.weight": self.input_norm.load,
            "post_attention_layernorm.weight": self.mlp_norm.load,
        }
        for part in ("gate", "up"):
            loaders |= column_loaders(f"mlp.{part}_proj", self.gate_up, part)
        return loaders | row_loaders("mlp.down_proj", self.down, self.gate_up.bias is not None)


class AttentionLayer(DecoderLayer):
    """A layer of attention. A family overrides what it does differently."""

    # Whether the query projection brings a gate of the attention's output along.
    output_gate = False

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        heads: HeadShard,
        dtype: torch.dtype,
        group: Group,
    ) -> None:
        super().__init__(config, index, heads, dtype, group)
        size, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.heads = heads
        self.head_dim = dim
        self.visibility = Visibility(True, config.sliding_windows[index])
        q = Shard(heads.num_heads * dim, heads.head_start * dim, heads.head_count * dim)
        k = Shard(heads.num_kv_heads * dim, heads.kv_start * dim, heads.kv_count * dim)
        parts = {"q": q, "k": k, "v": k} | ({"gate": q} if self.output_gate else {})
        self.qkv = ColumnParallelLinear(size, parts, bias, dtype)
        self.output = RowParallelLinear(q, size, dtype, group, bias)

    def mix(
        self,
        normed: Tensor,
        rotation: Rotation,
        memory: LayerMemory,
        plan: BlockPlan,
        attention: AttentionBackend,
    ) -> Tensor:
        """Attention over the context and the block's own rows."""
        kv = cast(PagedKV, memory)
        q = self.place(self.qkv(normed), rotation, kv, plan.slots)
        mixed: Tensor = self.output(attention.attend(q, kv, plan, self.visibility))
        return mixed

    def place(self, qkv: Tensor, rotation: Rotation, kv: PagedKV, slots: Tensor) -> Tensor:
        """Write keys and values of rows to ``slots [B * T]``; their queries, normed and turned."""
        return rotate_and_write(qkv, rotation, slots, kv, self.head_norms())

    def write_kv(self, normed: Tensor, rotation: Rotation, kv: PagedKV, slots: Tensor) -> None:
        """Keys and values of rows, which hang on nothing but what the layer reads of them."""
        self.place(self.qkv(normed), rotation, kv, slots)

    def head_norms(self) -> HeadNorm | None:
        """How query and key heads are normed before rotation: here, not at all."""
        return None

    def allocate(self, sizes: MemorySizes) -> PagedKV:
        """Keys and values of so many positions."""
        shape = (sizes.positions, self.heads.kv_count, self.head_dim)
        return PagedKV.allocate(*shape, sizes.kv_dtype, sizes.device)

    def loaders(self) -> dict[str, Loader]:
        """The shared ones and the projections."""
        loaders = super().loaders()
        for part in ("q", "k", "v"):
            loaders |= column_loaders(f"self_attn.{part}_proj", self.qkv, part)
        has_bias = self.qkv.bias is not None
        return loaders | row_loaders("self_attn.o_proj", self.output, has_bias)


def column_loaders(name: str, linear: ColumnParallelLinear, part: str) -> dict[str, Loader]:
    """How weight and bias of one part of a fused layer are loaded."""

    def weight(full: Tensor) -> None:
        linear.load(full, part)

    def bias(full: Tensor) -> None:
        linear.load(full, part, bias=True)

    if linear.bias is None:
        return {f"{name}.weight": weight}
    return {f"{name}.weight": weight, f"{name}.bias": bias}


def row_loaders(name: str, linear: RowParallelLinear, has_bias: bool) -> dict[str, Loader]:
    """How weight and bias of a layer whose columns are dealt are loaded."""

    def bias(full: Tensor) -> None:
        linear.load(full, bias=True)

    if not has_bias:
        return {f"{name}.weight": linear.load}
    return {f"{name}.weight": linear.load, f"{name}.bias": bias}
