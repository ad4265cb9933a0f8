"""The token mixer of a gated delta net layer (arXiv 2412.06464, as Qwen3.5 has it).

Queries, keys and values go through a short convolution and SiLU, queries and keys are brought to
length one; each value head has a decay and a writing strength of its own. Outputs are RMS-normed,
head by head, and gated. Value heads are dealt to ranks with their whole key head's group.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from knockon.errors import Refused
from knockon.layers.attention import BlockPlan
from knockon.layers.delta_rule import DeltaChunks, chunks_and_kept, delta_chunks, without_padding
from knockon.layers.fused.delta_inputs import DeltaWeights, delta_inputs
from knockon.layers.fused.gated_norm import gated_norm
from knockon.layers.linear import ColumnParallelLinear, RowParallelLinear, Shard
from knockon.layers.recurrent_state import DeltaMemory, HeldBlock
from knockon.models.decoder_layer import column_loaders
from knockon.models.qwen3_5_config import DeltaConfig
from knockon.models.strict import Loader
from knockon.parallel import Group, HeadShard


class GatedDeltaNet(nn.Module):
    """Mixes tokens through one state a value head.

    Args:
        config: sizes of heads, states and the convolution.
        hidden_size: ``H``.
        eps: of the output's norm.
        dtype: of weights and activations; the recurrence is computed in FP32 or wider.
        group: the ranks that share it.

    Attributes:
        chunks: takes prompts in; verified blocks and single rows go their own way.
    """

    chunks: DeltaChunks

    def __init__(
        self, config: DeltaConfig, hidden_size: int, eps: float, dtype: torch.dtype, group: Group
    ) -> None:
        super().__init__()
        self.config = config
        self.eps = eps
        self.dtype = dtype
        self.chunks = delta_chunks
        self.wide = torch.promote_types(dtype, torch.float32)
        self.heads = heads = HeadShard.deal(
            config.num_value_heads, config.num_key_heads, group.size, group.rank
        )
        each = Shard(heads.num_heads, heads.head_start, heads.head_count)
        key = _heads(heads.num_kv_heads, heads.kv_start, heads.kv_count, config.key_dim)
        value = _heads(each.full, each.start, each.count, config.value_dim)
        parts = {"q": key, "k": key, "v": value, "z": value, "b": each, "a": each}
        self.projection = ColumnParallelLinear(hidden_size, parts, False, dtype)
        self.output = RowParallelLinear(value, hidden_size, dtype, group)
        self.channels = {"q": key, "k": key, "v": value}
        width = sum(part.count for part in self.channels.values())
        self.conv = self._parameter(config.conv_width, width)
        self.rate = self._parameter(each.count)  # -exp(A_log)
        self.dt_bias = self._parameter(each.count)
        self.norm = self._parameter(config.value_dim)

    def forward(self, normed: Tensor, memory: DeltaMemory, plan: BlockPlan) -> Tensor:
        """``[B, T, H]`` to ``[B, T, H]``; moves the states on, or holds what would move them."""
        rows = plan.states
        if rows is None:
            raise ValueError("this plan was made without states")
        if rows.kept is not None and (rows.held or plan.rows == 1):
            raise ValueError("states are kept inside of a prompt's rows alone")
        sizes = [sum(self.projection.sizes[:3]), *self.projection.sizes[3:]]
        mixed, z, b, a = self.projection(normed).split_with_sizes(sizes, -1)
        starts = plan.positions[:, 0]
        conv = memory.conv_rows(rows, starts, mixed)
        config = self.config
        weights = DeltaWeights(self.conv, self.rate, self.dt_bias, config.key_dim, config.value_dim)
        inputs = delta_inputs(conv, b, a, weights)
        if rows.counts is not None:
            inputs = without_padding(inputs, rows.counts)
        if rows.held or plan.rows == 1:
            out, corrections = memory.step(rows, starts, inputs)
            if rows.held:
                memory.hold(HeldBlock(inputs.k, corrections, inputs.log_decay, conv))
        else:
            state = memory.states_before(rows, starts, self.wide)
            if rows.kept is None:
                out, state = self.chunks(inputs, state)
            else:
                aside, counts, cut = rows.kept
                out, state, kept = chunks_and_kept(self.chunks, inputs, state, counts, cut)
                memory.write_states(aside, kept)
                memory.write_inputs(aside, conv, counts)
            memory.write_states(rows.slots, state)
        if not rows.held:
            count = plan.rows if rows.counts is None else rows.counts
            memory.write_inputs(rows.slots, conv, count)
        mixed_rows: Tensor = self.output(gated_norm(out, z, self.norm, self.eps))
        return mixed_rows

    def allocate(self, states: int, dtype: torch.dtype, device: torch.device) -> DeltaMemory:
        """States of so many slots."""
        config, heads = self.config, self.heads.head_count
        return DeltaMemory(
            states,
            (heads, config.key_dim, config.value_dim),
            (config.conv_width - 1, self.conv.shape[1]),
            dtype,
            self.dtype,
            device,
        )

    def loaders(self) -> dict[str, Loader]:
        """How each checkpoint tensor is loaded, by its name within the mixer."""
        loaders: dict[str, Loader] = {
            "in_proj_qkv.weight": self._load_qkv,
            "conv1d.weight": self._load_conv,
            "A_log": self._load_rate,
            "dt_bias": lambda full: self._load_heads(self.dt_bias, full),
            "norm.weight": lambda full: _copy(self.norm, full),
            "out_proj.weight": self.output.load,
        }
        for part in ("z", "b", "a"):
            loaders |= column_loaders(f"in_proj_{part}", self.projection, part)
        return loaders

    def _parameter(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.zeros(shape, dtype=self.wide), requires_grad=False)

    def _split(self, full: Tensor) -> dict[str, Tensor]:
        """The whole checkpoint tensor's rows for queries, keys and values."""
        sizes = [part.full for part in self.channels.values()]
        if full.shape[0] != sum(sizes):
            raise Refused("weight rows", full.shape[0], f"{sum(sizes)}")
        return dict(zip(self.channels, full.split(sizes), strict=True))

    def _load_qkv(self, full: Tensor) -> None:
        for part, rows in self._split(full).items():
            self.projection.load(rows, part)

    def _load_conv(self, full: Tensor) -> None:
        if full.dim() != 3 or full.shape[1:] != (1, self.config.conv_width):
            wanted = f"[channels, 1, {self.config.conv_width}]"
            raise Refused("convolution shape", tuple(full.shape), wanted)
        own = [
            rows[part.start : part.start + part.count]
            for rows, part in zip(self._split(full).values(), self.channels.values(), strict=True)
        ]
        _copy(self.conv, torch.cat(own).squeeze(1).t())

    def _load_rate(self, full: Tensor) -> None:
        self._load_heads(self.rate, -full.to(self.wide).exp())

    def _load_heads(self, into: nn.Parameter, full: Tensor) -> None:
        heads = self.heads
        if tuple(full.shape) != (heads.num_heads,):
            raise Refused("shape", tuple(full.shape), f"{(heads.num_heads,)}")
        _copy(into, full[heads.head_start : heads.head_start + heads.head_count])


def _heads(count: int, start: int, own: int, dim: int) -> Shard:
    return Shard(count * dim, start * dim, own * dim)


def _copy(into: nn.Parameter, full: Tensor) -> None:
    if into.shape != full.shape:
        raise Refused("shape", tuple(full.shape), f"{tuple(into.shape)}")
    with torch.no_grad():
        into.copy_(full)
