"""Groups of ranks: who takes part in a collective, and the three collectives Knockon needs."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

# Torch 2.13 renamed it and warns of the old name on every rank's standard error.
_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@runtime_checkable
class Group(Protocol):
    """The ranks that share one model.

    ``all_gather(out, x)`` fills ``out`` of ``[size, *x.shape]`` rank-major; ``all_reduce(x)`` sums
    in place; ``broadcast(x)`` overwrites ``x`` with rank 0's in place. Every rank calls the same
    collectives in the same order with the same shapes.
    """

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def all_gather(self, out: Tensor, x: Tensor) -> None: ...

    def all_reduce(self, x: Tensor) -> None: ...

    def broadcast(self, x: Tensor) -> None: ...


class SingleRank:
    """A group of one: every collective is the identity."""

    size = 1
    rank = 0

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        out[0].copy_(x)

    def all_reduce(self, x: Tensor) -> None:
        return

    def broadcast(self, x: Tensor) -> None:
        return


class TorchGroup:
    """A ``torch.distributed`` process group (gloo on CPUs, NCCL on GPUs).

    Args:
        process_group: the group, or ``None`` for the default one, which must be initialised.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self.size = dist.get_world_size(process_group)
        self.rank = dist.get_rank(process_group)
        self._root = dist.get_global_rank(process_group, 0) if process_group is not None else 0

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        # Flat, since gloo takes only outputs concatenated along the first dimension.
        flat = x.contiguous().view(-1)
        _gather_flat(out.view(-1), flat, group=self.process_group)

    def all_reduce(self, x: Tensor) -> None:
        dist.all_reduce(x, group=self.process_group)

    def broadcast(self, x: Tensor) -> None:
        dist.broadcast(x, src=self._root, group=self.process_group)


def gather_last(x: Tensor, group: Group) -> Tensor:
    """Concatenate every rank's ``x [..., n]`` along the last dimension: ``[..., size * n]``."""
    if group.size == 1:
        return x
    out = x.new_empty((group.size, *x.shape))
    group.all_gather(out, x)
    return torch.movedim(out, 0, -2).reshape(*x.shape[:-1], group.size * x.shape[-1])
