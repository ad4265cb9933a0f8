"""Tensor-parallel linear layers, each of which takes its own shard out of the full weight.

On a CPU, a weight repacked once into oneDNN's blocked layout is read about twice as fast as a plain
one, so inference calls :meth:`pack` after loading. A packed layer keeps no plain copy.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from knockon.errors import Refused
from knockon.layers.fused.silu_mul import silu_mul
from knockon.layers.fused.stream_linear import stream_gated, stream_linear
from knockon.parallel import Group


class Shard:
    """One named part of a fused weight: rows ``[start, start + count)`` of ``full`` rows."""

    __slots__ = ("count", "full", "start")

    def __init__(self, full: int, start: int, count: int) -> None:
        self.full = full
        self.start = start
        self.count = count


class ReplicatedLinear(nn.Module):
    """``y = x Wᵀ + b`` with ``W [out, in]`` whole on every rank, plain or repacked for the CPU."""

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, dtype=dtype), requires_grad=False
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype), requires_grad=False)
        self.packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return packed_linear(x, self.packed, self.bias)
        return stream_linear(x, self.weight, self.bias)

    def gated(self, x: Tensor) -> Tensor:
        """``silu(gate) * other`` of a layer whose outputs are a gate and as many others."""
        if self.packed is not None:
            return silu_mul(packed_linear(x, self.packed, self.bias))
        return stream_gated(x, self.weight, self.bias)

    def load(self, full: Tensor) -> None:
        """Copy the whole weight ``full [out, in]``."""
        want = (self.out_features, self.in_features)
        if tuple(full.shape) != want:
            raise Refused("weight shape", tuple(full.shape), f"{want}")
        with torch.no_grad():
            self.weight.copy_(full)

    def pack(self) -> None:
        """Repack for CPU inference where that is possible; the plain weight is dropped."""
        self.packed = pack_weight(self.weight)
        if self.packed is not None:
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)


def pack_weight(weight: Tensor) -> Tensor | None:
    """``weight [out, in]`` in oneDNN's blocked layout, or ``None`` where that cannot be had.

    BF16 needs a CPU with AVX-512 BF16 or better instructions; FP64 has no such kernels.
    """
    if (
        weight.device.type != "cpu"
        or weight.numel() == 0
        or not torch.backends.mkldnn.is_available()
    ):
        return None
    if weight.dtype == torch.bfloat16:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return None
    elif weight.dtype != torch.float32:
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [..., in]`` times a weight of :func:`pack_weight`, the same bits for a row in any batch.

    oneDNN multiplies a lone row by another kernel, which sums in another order; given twice, the
    row goes the way of every other.
    """
    if x.numel() == x.shape[-1]:
        x = x.expand(2, *x.shape[1:])
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")[:1]
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


_ROWS_HINT = 8  # rows that a decode step has; the layout chosen for it serves 1 to 128 as well


class ColumnParallelLinear(ReplicatedLinear):
    """Output rows are dealt to ranks; several checkpoint weights may be fused into one.

    Args:
        parts: name to :class:`Shard`, in the order in which the outputs are concatenated. For a
            layer of one weight the name is ``""``.
    """

    def __init__(
        self, in_features: int, parts: dict[str, Shard], bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__(in_features, sum(p.count for p in parts.values()), bias, dtype)
        self.parts = parts
        self.sizes = [p.count for p in parts.values()]

    def load(self, full: Tensor, part: str = "", bias: bool = False) -> None:
        """Copy this rank's rows of ``full`` (the whole checkpoint tensor of ``part``)."""
        shard = self.parts[part]
        offset = 0
        for name, other in self.parts.items():
            if name == part:
                break
            offset += other.count
        want = (shard.full,) if bias else (shard.full, self.in_features)
        if tuple(full.shape) != want:
            raise Refused(f"{part or 'weight'} shape", tuple(full.shape), f"{want}")
        target = self.bias if bias else self.weight
        assert target is not None
        with torch.no_grad():
            target[offset : offset + shard.count].copy_(
                full[shard.start : shard.start + shard.count]
            )


class RowParallelLinear(ReplicatedLinear):
    """Input columns are dealt to ranks; the partial products are summed over the group."""

    def __init__(
        self,
        columns: Shard,
        out_features: int,
        dtype: torch.dtype,
        group: Group,
        bias: bool = False,
    ) -> None:
        super().__init__(columns.count, out_features, bias and group.rank == 0, dtype)
        self.columns = columns
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.group.size > 1:
            self.group.all_reduce(y)
        return y

    def load(self, full: Tensor, bias: bool = False) -> None:
        """Copy this rank's columns of ``full [out, in]``; a bias lives on rank 0 alone."""
        want = (self.out_features,) if bias else (self.out_features, self.columns.full)
        if tuple(full.shape) != want:
            raise Refused("weight shape", tuple(full.shape), f"{want}")
        with torch.no_grad():
            if not bias:
                start = self.columns.start
                self.weight.copy_(full[:, start : start + self.columns.count])
            elif self.bias is not None:
                self.bias.copy_(full)
