"""The Domino rollout: base logits, one exchange between ranks, then a chain of local steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from knockon.errors import Refused
from knockon.parallel import Group, VocabShard
from knockon.rollout import order
from knockon.rollout.candidates import (
    Candidates,
    GatheredLogits,
    gather_full,
    pool_of_gathered,
    prefix_tokens,
)
from knockon.rollout.compact import exchange_compact
from knockon.rollout.correction import (
    Correction,
    PoolInParts,
    PoolOnly,
    WholeVocabulary,
    reads_in_parts,
)
from knockon.rollout.exchange import EXCHANGES, Exchange, choose_exchange
from knockon.rollout.fp8_head import FP8Head
from knockon.rollout.fused.block import FusedBlock
from knockon.rollout.fused.choose import choose_implementation
from knockon.rollout.gates import (
    ComputedGates,
    GateTableChoice,
    TabulatedGates,
    choose_gate_table,
    tabulate,
)
from knockon.rollout.head import FLOAT_DTYPES, DominoHead
from knockon.rollout.layout import VocabLayout, agree, checksum
from knockon.rollout.products import cuts
from knockon.rollout.recurrence import Recurrence
from knockon.rollout.validation import (
    LMHeadLike,
    dtype_number,
    holds_whole_embedding,
    refuse_block,
    refuse_callable,
    refuse_inputs,
    refuse_logits,
    refuse_settings,
    refuse_shards,
)

ChosenFrom = Candidates | GatheredLogits
# What the numbers mean in which ranks tell each other their settings.
_CHOICES = {
    "exchange": EXCHANGES,
    "head dtype": FLOAT_DTYPES,
    "lm_head dtype": FLOAT_DTYPES,
    "embedding dtype": FLOAT_DTYPES,
}


class DominoRollout:
    """Turns a drafted block into a causal chain of proposals, the same on every rank.

    Args:
        head: the Domino head, whole on every rank.
        embedding: the target's ``[V, H]``, or this rank's shard of it: ``num_org`` rows, or
            ``num_padded``.
        lm_head: this rank's ``[num_padded, H]`` tensor, or a callable from ``[N, H]`` to
            ``[N, num_padded]`` logits already in the Domino head's dtype, e.g. a prepacked CPU head
            or an :class:`~knockon.rollout.fp8_head.FP8Head`. What a callable gives is seen, and
            refused, when a block is rolled out.
        shard: which ids this rank holds.
        group: the ranks. Construction takes collectives, so all ranks construct together; in the
            first they tell each other what each found, so that one's refusal is every rank's.
        pool_size: ``K``; 0, or ``V`` and more, scores the whole vocabulary (stage A).
        exchange: ``"auto"``, ``"full"`` or ``"compact"``; without a pool it is always full.
        gate_table: ``"auto"``, ``True`` or ``False``: tabulate the GRU's input gates, as
            :func:`~knockon.rollout.gates.choose_gate_table` says. ``gate_table_bytes`` is the cost.
        sharded_embedding: whether ``embedding`` is only this rank's shard; by default its number of
            rows tells, which is refused where ``num_padded`` is ``V`` itself.
        shards: every rank's shard in rank order, where the caller knows them, e.g. with a group
            that stands in for absent ranks; else the ranks tell each other. A list is held to
            ``shard``, the group and the other ranks' lists, in the same collective.
        implementation: ``"auto"``, ``"plain"`` (PyTorch) or ``"fused"`` (Triton kernels); ``auto``
            takes the kernels where they run and fit.

    Attributes:
        implementation: the one taken, ``"plain"`` or ``"fused"``.
        why_plain: why ``auto`` did not take the kernels; empty where it did, or was not asked.
        gate_table_bytes: memory of the table, 0 without one.
        nan_rows: int64 scalar on the device; rows of this rank's base logits that held a NaN, over
            all calls.
        exchange_taken: the exchange of the latest call, ``None`` before the first.

    Raises:
        Refused: weights, shard, group or settings that do not fit together, on any rank.
    """

    def __init__(
        self,
        head: DominoHead,
        embedding: Tensor,
        lm_head: LMHeadLike,
        shard: VocabShard,
        group: Group,
        pool_size: int = 2048,
        exchange: str = "auto",
        *,
        gate_table: GateTableChoice = "auto",
        sharded_embedding: bool | None = None,
        shards: Sequence[VocabShard] | None = None,
        implementation: str = "auto",
    ) -> None:
        table_bytes = shard.vocab_size * 3 * head.gru_size * head.gru_input.element_size()
        whole = tabulated = False
        taken, pool = "", 0
        problem: Refused | None = None
        try:
            refuse_inputs(head, embedding, lm_head, shard, group, pool_size, exchange)
            if shards is not None:
                refuse_shards(shards, shard)
            whole = holds_whole_embedding(embedding, shard, sharded_embedding)
            tabulated = choose_gate_table(gate_table, table_bytes, sharded=not whole)
            pool = pool_size if pool_size < shard.vocab_size else 0
            taken, _ = choose_implementation(implementation, head, tabulated, pool)
        except Refused as refusal:
            problem = refusal
        settings = {
            "hidden size": head.hidden_size,
            "GRU width": head.gru_size,
            "correction width": head.correction_size,
            "prefix_len": head.prefix_len,
            "shift_label": int(head.shift_label),
            "head dtype": dtype_number(head.dtype),
            "lm_head dtype": dtype_number(_logits_dtype(lm_head, head)),
            "embedding dtype": dtype_number(getattr(embedding, "dtype", None)),
            "pool_size": pool,
            "exchange": EXCHANGES.index(exchange) if exchange in EXCHANGES else -1,
            "gate_table": int(tabulated),
            # What auto comes to may differ, e.g. where one rank lacks Triton.
            "fused kernels": int(taken == "fused"),
            "checksum of shards": 0 if shards is None or problem else checksum(shards),
        }
        told = agree(shard, group, settings, _CHOICES, problem, head.device)

        self.head = head
        self.shard = shard
        self.group = group
        self.layout = VocabLayout(told if shards is None else shards, head.device)
        self._logits = _as_callable(lm_head)
        self._logits_dtype = _logits_dtype(lm_head, head)
        self._recurrence = Recurrence(head)
        self._finite = _all_finite(head.correction_out)
        if head.device.type == "cuda":
            cuts(head.device)
            if head.dtype.itemsize == 2:
                order.rank_table(head.dtype, head.device)
        self._gates: TabulatedGates | ComputedGates
        if tabulated:
            first = shard.start if whole else 0
            with torch.no_grad():
                own_rows = embedding[first : first + shard.num_org]
                table = tabulate(head, own_rows, self.layout, group)
            self._gates = TabulatedGates(table, head.compute_dtype)
        else:
            self._gates = ComputedGates(head, embedding)
        self.gate_table_bytes = table_bytes if tabulated else 0
        self._fused_block: FusedBlock | None = None  # made when first needed, then shared
        self._settle(pool_size, exchange, implementation)

    def _settle(self, pool_size: int, exchange: str, implementation: str) -> None:
        head = self.head
        self.exchange = exchange
        self._asked_implementation = implementation
        self.pool_size = pool_size if pool_size < self.shard.vocab_size else 0
        self.exchange_taken: Exchange | None = None
        self.nan_rows = torch.zeros((), dtype=torch.int64, device=head.device)
        self._correction_out = head.correction_out
        if self.pool_size == 0:
            self._correction_out = head.correction_out.to(head.compute_dtype)
        table = self._gates.table if isinstance(self._gates, TabulatedGates) else None
        self.implementation, self.why_plain = choose_implementation(
            implementation, head, table is not None, self.pool_size
        )
        self._fused: FusedBlock | None = None
        if self.implementation == "fused" and table is not None:
            if self._fused_block is None:
                draft_half = self._recurrence.draft_half
                self._fused_block = FusedBlock(head, draft_half, table, self.layout, self.group)
            self._fused = self._fused_block

    def with_settings(
        self,
        pool_size: int | None = None,
        exchange: str | None = None,
        implementation: str | None = None,
        lm_head: FP8Head | None = None,
    ) -> DominoRollout:
        """The same Domino head with other settings; its weights and gate table are shared.

        What is not given stays as it is here. Counters start anew. It takes no collective; every
        rank asks for the same.

        Args:
            lm_head: an FP8 copy of the LM head, to take base logits from instead.

        Raises:
            Refused: ``pool_size < 0``, an unknown exchange or implementation, kernels that cannot
                run, or an LM head that does not fit.
        """
        pool_size = self.pool_size if pool_size is None else pool_size
        exchange = self.exchange if exchange is None else exchange
        refuse_settings(pool_size, exchange)
        other = copy.copy(self)
        if lm_head is not None:
            if not isinstance(lm_head, FP8Head):
                raise Refused("lm_head", type(lm_head).__name__, "an FP8Head")
            refuse_callable(lm_head, self.head, self.shard)
            other._logits, other._logits_dtype = lm_head, lm_head.dtype
        implementation = self._asked_implementation if implementation is None else implementation
        other._settle(pool_size, exchange, implementation)
        return other

    def exchange_for(self, batch: int, steps: int, *, in_graph: bool = False) -> Exchange:
        """The exchange that a block of this size takes; nothing but sizes decides.

        ``auto`` is always compact with the fused kernels, for which it was faster at every batch
        measured. Else the published rule decides (:func:`choose_exchange`); it counts a logit as
        wide as the LM head's weights, or, where that is a callable, as the Domino head's.
        """
        gathered = self.group.size * steps * batch * self.shard.num_padded
        thresholds = {}
        if self.implementation == "fused":
            thresholds = {"graph_full_batch": 0, "eager_full_bytes": 0}
        return choose_exchange(
            batch,
            gathered * self._logits_dtype.itemsize,
            in_graph,
            self.pool_size,
            ranks=self.group.size,
            requested=self.exchange,
            **thresholds,
        )

    @torch.no_grad()
    def __call__(
        self,
        draft_hidden: Tensor,
        bonus: Tensor,
        steps: int | None = None,
        *,
        in_graph: bool | None = None,
    ) -> Tensor:
        """Propose ``steps`` tokens after each bonus token.

        Nothing is read back to the host and no shape depends on data.

        Args:
            draft_hidden: the draft's rows ``Z [B, L, H]`` in a floating dtype, equal on all
                ranks; ``L >= 1`` where ``steps`` is not given. FP64 goes with an FP64 head and only
                with that.
            bonus: ``[B]`` int64; ids from 0 to ``V - 1``, which is not checked, since it would take
                the host.
            steps: proposals, by default ``L - 1``; at most that, or ``L`` with ``shift_label``.
            in_graph: whether this call belongs to a CUDA graph, for the choice of exchange; by
                default, whether one is being captured. Pass ``True`` when warming up for one.

        Returns:
            ``[B, steps]`` int64.

        Raises:
            Refused: shapes, dtypes or devices that do not fit, more steps than the block has rows
                for, or an LM head that gives no such logits. On one rank alone it leaves the others
                to their collective's timeout.
        """
        batch, steps = refuse_block(self.head, draft_hidden, bonus, steps)
        offset = 0 if self.head.shift_label else 1
        if steps == 0 or batch == 0:
            return bonus.new_empty((batch, steps), dtype=torch.int64)

        z = draft_hidden[:, offset : offset + steps].transpose(0, 1).contiguous()  # [T, B, H]
        packed = z.view(steps * batch, self.head.hidden_size)
        draft_part = self._fused.begin(packed, steps) if self._fused is not None else None
        local = self._base_logits(packed).view(steps, batch, self.shard.num_padded)
        bonus = bonus.to(torch.int64).contiguous()

        if in_graph is None:
            in_graph = local.is_cuda and torch.cuda.is_current_stream_capturing()
        self.exchange_taken = self.exchange_for(batch, steps, in_graph=in_graph)
        if self._fused is not None:
            return self._fused.propose(
                draft_part, local, bonus, self.pool_size, self.exchange_taken, self.nan_rows
            )
        if self.shard.num_org:
            self.nan_rows += order.rows_with_nan(local[..., : self.shard.num_org])
        tokens, chosen_from = self._exchange(local)
        proposals = bonus.new_empty((steps, batch), dtype=torch.int64)
        for j, token in enumerate(tokens):
            proposals[j] = token
        if chosen_from is not None:
            self._fill(z, bonus, proposals, len(tokens), chosen_from)
        return proposals.t().contiguous()

    def _base_logits(self, packed: Tensor) -> Tensor:
        """``LMHead(z)`` of this rank's ids, ``[T * B, num_padded]``, contiguous."""
        logits = self._logits(packed)
        refuse_logits(logits, (len(packed), self.shard.num_padded), self._logits_dtype)
        return logits.contiguous()

    def _exchange(self, local: Tensor) -> tuple[list[Tensor], ChosenFrom | None]:
        """The prefix rows' tokens, and what the other rows choose from (``None`` without any)."""
        steps = local.shape[0]
        prefix = min(self.head.prefix_len, steps)
        if self.exchange_taken == "compact":
            return exchange_compact(local, self.shard, self.group, prefix, self.pool_size)
        gathered = gather_full(local, self.layout, self.group)
        tokens = prefix_tokens(gathered, prefix)
        if prefix == steps:
            return tokens, None
        if self.pool_size == 0:
            return tokens, gathered
        return tokens, pool_of_gathered(gathered, prefix, self.pool_size)

    def _fill(
        self, z: Tensor, bonus: Tensor, proposals: Tensor, prefix: int, chosen_from: ChosenFrom
    ) -> None:
        """Fill the rows of ``proposals [T, B]`` from ``prefix`` on."""
        draft_part = self._recurrence.from_draft(z[prefix:])
        if isinstance(chosen_from, GatheredLogits):
            correction = WholeVocabulary(chosen_from, self._correction_out)
            self._chain(draft_part, bonus, proposals, correction)
            return

        weight, dtype = self._correction_out, self.head.compute_dtype
        pool_values = chosen_from.ids.numel() * self.head.correction_size
        in_parts = reads_in_parts(pool_values, weight.dtype, weight.is_cuda)
        kind = PoolInParts if in_parts else PoolOnly
        pool = kind(chosen_from, weight, prefix, dtype, self._finite)
        self._chain(draft_part, bonus, proposals, pool)

    def _chain(
        self, draft_part: Tensor, bonus: Tensor, proposals: Tensor, correction: Correction
    ) -> None:
        """``s_{j+1} = GRUCell(embedding(d_j), s_j)`` and ``d_j = argmax (base_j + c_j)``."""
        steps, p = len(proposals), len(proposals) - len(draft_part)
        recurrence = self._recurrence
        sums = recurrence.products(draft_part, steps)
        token = bonus
        state, state_gates = recurrence.zero_state(len(bonus))
        for j in range(steps):
            state = recurrence.cell(state, self._gates(token), state_gates)
            state_gates, before_silu = recurrence.from_state(state, sums[j])
            token = proposals[j]
            if j >= p:
                correction.choose(j, F.silu(before_silu), token)


def _all_finite(weight: Tensor) -> bool:
    return bool(torch.stack(weight.aminmax()).isfinite().all())


def _as_callable(lm_head: LMHeadLike) -> Callable[[Tensor], Tensor]:
    if not isinstance(lm_head, Tensor):
        return lm_head
    weight = lm_head
    return lambda x: F.linear(x.to(weight.dtype), weight)


def _logits_dtype(lm_head: LMHeadLike, head: DominoHead) -> torch.dtype:
    return lm_head.dtype if isinstance(lm_head, Tensor) else head.dtype
