"""A block by the fused kernels: selection, exchange, and the chain."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from knockon.parallel import Group
from knockon.rollout.candidates import gather_full
from knockon.rollout.exchange import Exchange
from knockon.rollout.fused.best_k import best_k
from knockon.rollout.fused.chain import ChainWeights, PoolBase, run_chain
from knockon.rollout.fused.pool_base import own_pool_base
from knockon.rollout.fused.prefix import merge_prefix
from knockon.rollout.fused.select import select
from knockon.rollout.fused.selected import Selected
from knockon.rollout.head import DominoHead
from knockon.rollout.layout import VocabLayout

# Up to this batch one rank's chain reads base logits where the LM head left them. Beyond, 2-byte
# reads all over the logits in every step cost more than gathering them once.
INDEXED_REQUESTS = 2


class FusedBlock:
    """What the fused path keeps beyond the plain one: the chain's weights, and a stream.

    It depends on no settings, so rollouts that share a head share it.

    Args:
        head: in BF16, FP16 or FP32.
        draft_half: the ``z`` half of ``W1``, ``[E, H]``, as the plain path keeps it.
        table: the tabulated input gates ``[V, 3G]``.
        layout: every rank's shard.
        group: the ranks.
    """

    def __init__(
        self,
        head: DominoHead,
        draft_half: Tensor,
        table: Tensor,
        layout: VocabLayout,
        group: Group,
    ) -> None:
        self.weights = ChainWeights.of(head, table)
        self.draft_half = draft_half
        self.prefix_len = head.prefix_len
        self.layout = layout
        self.shard = layout.shards[group.rank]
        self.group = group
        self._stream = None
        if head.device.type == "cuda":
            self._stream = torch.cuda.Stream(head.device)

    def begin(self, packed: Tensor, steps: int) -> Tensor | None:
        """The ``z`` half of ``W1 · [z ; s]`` of the corrected rows, ``[T - p, B, E]`` FP32.

        On a GPU it runs on a stream of its own, beside the LM head. ``None`` without such rows.
        """
        prefix = min(self.prefix_len, steps)
        if prefix == steps:
            return None
        batch = len(packed) // steps
        rows = packed[prefix * batch :]
        weight = self.draft_half
        shape = (steps - prefix, batch, len(weight))
        if self._stream is None:
            return F.linear(rows.float(), weight.float()).view(shape)
        out = torch.empty((len(rows), len(weight)), dtype=torch.float32, device=rows.device)
        self._stream.wait_stream(torch.cuda.current_stream(rows.device))
        if not torch.cuda.is_current_stream_capturing():
            # Should the caller's LM head raise, both are freed while this stream still works.
            out.record_stream(self._stream)
            rows.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            if rows.dtype == weight.dtype and rows.dtype != torch.float32:
                torch.mm(rows, weight.t(), out_dtype=torch.float32, out=out)
            else:
                torch.mm(rows.float(), weight.t().float(), out=out)
        return out.view(shape)

    def propose(
        self,
        draft_part: Tensor | None,
        local: Tensor,
        bonus: Tensor,
        pool_size: int,
        exchange: Exchange,
        nan_rows: Tensor,
    ) -> Tensor:
        """``[B, T]`` int64.

        Args:
            draft_part: what :meth:`begin` gave.
            local: this rank's base logits ``[T, B, N]``.
            bonus: ``[B]`` int64.
            pool_size: ``0 < K < V``.
            exchange: how base logits cross ranks.
            nan_rows: as in :func:`~knockon.rollout.fused.select.select`.
        """
        steps, batch, _ = local.shape
        prefix = min(self.prefix_len, steps)
        tokens = bonus.new_empty((batch, steps))
        if self.group.size == 1:
            own = self._select(local, self.shard.rank, prefix, pool_size, nan_rows)
            tokens[:, :prefix] = own.prefix_ids
            pool, base = own.pool_ids, PoolBase(local, indexed=True)
            if batch > INDEXED_REQUESTS and steps > prefix:
                dense = own_pool_base(local[prefix:], pool, self.shard.start, self.shard.num_org)
                base = PoolBase(dense, indexed=False)
        elif exchange == "compact":
            pool, base = self._compact(local, tokens, prefix, pool_size, nan_rows)
        else:
            pool, base = self._full(local, tokens, prefix, pool_size, nan_rows)
        if draft_part is not None:
            if self._stream is not None:
                torch.cuda.current_stream(local.device).wait_stream(self._stream)
            run_chain(self.weights, draft_part, bonus, tokens, pool, base, prefix)
        return tokens

    def _select(
        self, local: Tensor, rank: int, prefix: int, pool_size: int, nan_rows: Tensor
    ) -> Selected:
        shard = self.layout.shards[rank]
        return select(local, shard.num_org, shard.start, prefix, pool_size, nan_rows)

    def _compact(
        self, local: Tensor, tokens: Tensor, prefix: int, pool_size: int, nan_rows: Tensor
    ) -> tuple[Tensor, PoolBase]:
        """Two collectives: one gather of offers, one sum of the pool's base logits."""
        own = self._select(local, self.shard.rank, prefix, pool_size, nan_rows)
        offers = torch.cat((own.prefix_keys, own.prefix_ids, own.pool_keys, own.pool_ids), dim=1)
        gathered = offers.new_empty((self.group.size, *offers.shape))
        self.group.all_gather(gathered, offers)
        sizes = [prefix, prefix, own.pool_keys.shape[1], own.pool_ids.shape[1]]
        prefix_keys, prefix_ids, pool_keys, pool_ids = gathered.split(sizes, dim=2)
        merge_prefix(prefix_keys, prefix_ids, tokens)
        keys, ids = (x.transpose(0, 1).flatten(1) for x in (pool_keys, pool_ids))
        if tokens.shape[1] == prefix:
            return ids, PoolBase(local, indexed=False)
        pool = best_k(keys, ids, pool_size)
        base = own_pool_base(local[prefix:], pool, self.shard.start, self.shard.num_org)
        self.group.all_reduce(base)  # every other rank adds zeros, so the sum is exact
        return pool, PoolBase(base, indexed=False)

    def _full(
        self, local: Tensor, tokens: Tensor, prefix: int, pool_size: int, nan_rows: Tensor
    ) -> tuple[Tensor, PoolBase]:
        """One collective: every rank's base logits; each rank then selects from all shards."""
        gathered = gather_full(local, self.layout, self.group)
        unused = torch.zeros_like(nan_rows)
        selected = [
            self._select(
                gathered.logits[rank],
                rank,
                prefix,
                pool_size,
                nan_rows if rank == self.shard.rank else unused,
            )
            for rank in range(self.group.size)
        ]
        merge_prefix(
            torch.stack([s.prefix_keys for s in selected]),
            torch.stack([s.prefix_ids for s in selected]),
            tokens,
        )
        keys = torch.cat([s.pool_keys for s in selected], dim=1)
        ids = torch.cat([s.pool_ids for s in selected], dim=1)
        if tokens.shape[1] == prefix:
            return ids, PoolBase(local, indexed=False)
        pool = best_k(keys, ids, pool_size)
        return pool, PoolBase(gathered.at(pool.long(), prefix), indexed=False)
