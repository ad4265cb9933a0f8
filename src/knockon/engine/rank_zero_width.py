"""One width for all ranks: rank 0 chooses, the others follow."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from knockon.engine.width import WidthPolicy
from knockon.parallel import Group


class RankZeroWidth:
    """A policy of which only rank 0's word counts: ranks time the same step differently.

    Args:
        policy: this rank's own; kept up to date everywhere, asked on rank 0 alone.
        group: the ranks that share the model. Every choice is a broadcast, so all must choose; it
            is made on the hosts, so that no step in flight is waited for.
    """

    def __init__(self, policy: WidthPolicy, group: Group) -> None:
        self.policy = policy
        self.group = group
        self.name = policy.name
        self.widths = policy.widths

    def choose(self, batch: int, speculating: int) -> int:
        width = self.policy.choose(batch, speculating) if self.group.rank == 0 else 0
        word = torch.tensor([width])
        self.group.broadcast(word)
        return int(word.item())

    def record(self, batch: int, width: int, accept_lengths: Sequence[int], seconds: float) -> None:
        self.policy.record(batch, width, accept_lengths, seconds)
