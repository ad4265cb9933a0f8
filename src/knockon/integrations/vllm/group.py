"""vLLM's tensor-parallel group under Knockon's group protocol."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class GroupCoordinator(Protocol):
    """What is used of ``vllm.distributed.parallel_state.GroupCoordinator``.

    ``all_gather`` concatenates along ``dim``; ``all_reduce`` may return its input or a new tensor.
    """

    world_size: int
    rank_in_group: int

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor: ...

    def all_reduce(self, input_: Tensor) -> Tensor: ...

    def broadcast(self, input_: Tensor, src: int = 0) -> Any: ...


class VllmGroup:
    """A :class:`~knockon.parallel.Group` of vLLM's ranks.

    Its collectives are vLLM's, custom all-reduce included, so they may stand in vLLM's CUDA graphs.
    The rollout's sums add zeros to one rank's numbers, which every algorithm for a sum leaves
    exact.
    """

    def __init__(self, coordinator: GroupCoordinator) -> None:
        self._coordinator = coordinator
        self.size = coordinator.world_size
        self.rank = coordinator.rank_in_group

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Fill ``out [size, *x.shape]``, rank-major."""
        flat, into = x.contiguous().view(-1), out.view(-1)
        if not (x.is_cuda or x.is_floating_point()):
            # vLLM's shared-memory gather on CPUs takes floats alone; it copies their bits.
            flat, into = flat.view(torch.float32), into.view(torch.float32)
        into.copy_(self._coordinator.all_gather(flat, dim=0))

    def all_reduce(self, x: Tensor) -> None:
        """Sum ``x`` in place."""
        total = self._coordinator.all_reduce(x)
        if total is not x:
            x.copy_(total)

    def broadcast(self, x: Tensor) -> None:
        """Overwrite ``x`` with rank 0's."""
        self._coordinator.broadcast(x, src=0)
