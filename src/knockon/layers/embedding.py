"""Vocabulary-parallel embedding and LM head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knockon.errors import Refused
from knockon.layers.fused.stream_linear import stream_linear
from knockon.layers.linear import pack_weight, packed_linear
from knockon.parallel import Group, VocabShard


class VocabParallelEmbedding(nn.Module):
    """This rank's rows of the embedding ``[num_padded, H]``; ids elsewhere contribute zero."""

    def __init__(
        self, hidden_size: int, shard: VocabShard, dtype: torch.dtype, group: Group
    ) -> None:
        super().__init__()
        self.shard = shard
        self.group = group
        self.weight = nn.Parameter(
            torch.zeros(shard.num_padded, hidden_size, dtype=dtype), requires_grad=False
        )

    def forward(self, ids: Tensor) -> Tensor:
        """``ids [...]`` int64 to embeddings ``[..., H]``."""
        if self.group.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.shard.start
        held = (local >= 0) & (local < self.shard.num_org)
        x = F.embedding(local.where(held, 0), self.weight)
        x = x * held.unsqueeze(-1).to(x.dtype)
        self.group.all_reduce(x)
        return x

    def load(self, full: Tensor) -> None:
        """Copy this rank's rows of ``full [V, H]``."""
        want = (self.shard.vocab_size, self.weight.shape[1])
        if tuple(full.shape) != want:
            raise Refused("embedding shape", tuple(full.shape), f"{want}")
        with torch.no_grad():
            self.weight[: self.shard.num_org].copy_(full[self.shard.start : self.shard.stop])


class LMHead(VocabParallelEmbedding):
    """The output head: this rank's rows of ``[V, H]``, no bias."""

    def __init__(
        self, hidden_size: int, shard: VocabShard, dtype: torch.dtype, group: Group
    ) -> None:
        super().__init__(hidden_size, shard, dtype, group)
        self.packed: Tensor | None = None

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Share the embedding's weight instead of holding one of its own."""
        self.weight = embedding.weight

    def pack(self) -> None:
        """Repack for CPU inference. The plain weight stays, since an embedding may share it."""
        self.packed = pack_weight(self.weight)

    def local(self, x: Tensor) -> Tensor:
        """This rank's logits ``[..., num_padded]`` of ``x [..., H]``, in the head's dtype."""
        if self.packed is not None:
            return packed_linear(x, self.packed)
        return stream_linear(x, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """All logits ``[..., V]`` of ``x [..., H]``, equal on every rank."""
        return self.gather(self.local(x))

    def gather(self, logits: Tensor) -> Tensor:
        """Every rank's ``logits [..., num_padded]`` as ``[..., V]``, padding removed."""
        if self.group.size == 1:
            return logits[..., : self.shard.vocab_size]
        out = logits.new_empty((self.group.size, *logits.shape))
        self.group.all_gather(out, logits)
        parts = [
            out[r][..., : VocabShard.deal(self.shard.vocab_size, self.group.size, r).num_org]
            for r in range(self.group.size)
        ]
        return torch.cat(parts, dim=-1)
