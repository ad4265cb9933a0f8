"""Data-parallel training: every rank takes its share of each batch, and all take the same step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from knockon.errors import Refused
from knockon.parallel import Group, SingleRank, TorchGroup, deal
from knockon.parallel.torchrun import joined, local_ranks, torchrun_size

# The first rank evaluates and writes while the others wait.
_WAIT = timedelta(minutes=60)


@dataclass(frozen=True)
class TrainRanks:
    """The ranks that share a run.

    Attributes:
        tensors: for sums of what lies on the device.
        decisions: for what the host decides on; on the CPU, so that asking waits for no kernel.
        device: of this rank.
    """

    tensors: Group = field(default_factory=SingleRank)
    decisions: Group = field(default_factory=SingleRank)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.tensors.size

    @property
    def first(self) -> bool:
        """Whether this rank prints and writes."""
        return self.tensors.rank == 0

    def share(self, rows: int) -> slice:
        """This rank's rows of a batch.

        Raises:
            Refused: fewer rows than ranks.
        """
        if rows < self.size:
            raise Refused("batch_size", rows, f"at least {self.size}, a sequence for each rank")
        start, count = deal(rows, self.size, self.tensors.rank)
        return slice(start, start + count)

    def agree(self, value: float) -> float:
        """The first rank's value, everywhere."""
        if self.size == 1:
            return value
        told = torch.tensor(value, dtype=torch.float64)
        self.decisions.broadcast(told)
        return float(told)

    def add(self, tensors: list[Tensor]) -> list[Tensor]:
        """Sums over the ranks, in one collective; FP32."""
        if self.size == 1:
            return [tensor.float() for tensor in tensors]
        flat = torch.cat([tensor.detach().float().flatten() for tensor in tensors])
        self.tensors.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def wait(self) -> None:
        """Until every rank is here."""
        if self.size > 1:
            self.decisions.all_reduce(torch.zeros(1))


@contextlib.contextmanager
def training_ranks() -> Iterator[TrainRanks]:
    """Those of ``torchrun``, or this process alone.

    Raises:
        Refused: fewer GPUs than ranks of this host.
    """
    cuda = torch.cuda.is_available()
    if torchrun_size() in (None, 1):
        yield TrainRanks(device=torch.device("cuda" if cuda else "cpu"))
        return
    if cuda and local_ranks() > torch.cuda.device_count():
        raise Refused(
            "torchrun --nproc-per-node",
            local_ranks(),
            f"at most {torch.cuda.device_count()}, the GPUs here",
        )
    with joined("nccl" if cuda else "gloo", _WAIT) as device:
        everyone = TorchGroup()
        hosts = TorchGroup(dist.new_group(backend="gloo", timeout=_WAIT)) if cuda else everyone
        yield TrainRanks(everyone, hosts, device)
