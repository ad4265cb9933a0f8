"""What the engine asks of a drafter: two calls, and a few facts about what it needs."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from knockon.layers.attention import BlockPlan
from knockon.rollout.exchange import Exchange


class KVShape(NamedTuple):
    """The draft KV of one rank: ``layers`` pairs of ``[slots, kv_heads, head_dim]``."""

    layers: int
    kv_heads: int
    head_dim: int


class DraftSizes(Protocol):
    """What a drafter's KV is reckoned from.

    Attributes:
        num_layers, num_heads, num_kv_heads, head_dim: of its attention, over all ranks.
        kept_per_position: further elements that every rank keeps of a position.
    """

    @property
    def num_layers(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def kept_per_position(self) -> int: ...


class DraftReport(NamedTuple):
    """What a drafter holds, and what it has met so far.

    Attributes:
        pool_size: Domino's ``K`` in force, 0 for the whole vocabulary; ``None`` without a rollout.
        implementation: of the rollout, ``"plain"`` or ``"fused"``; ``None`` without one.
        why_plain: why the rollout does not run the fused kernels; empty where it does.
        exchange: as asked for; ``None`` without a rollout.
        gate_table_bytes: memory of the table of input gates.
        nan_rows: rows of base logits that held a NaN, summed over the ranks.
        head_dtype: of the LM head that proposes: the target's, or ``"fp8"`` for a copy of it.
        head_bytes: memory of that copy on this rank, 0 without one.
    """

    pool_size: int | None = None
    implementation: str | None = None
    why_plain: str = ""
    exchange: str | None = None
    gate_table_bytes: int = 0
    nan_rows: int = 0
    head_dtype: str = ""
    head_bytes: int = 0


class Drafter(Protocol):
    """Turns verified state into proposals.

    Attributes:
        name: as configured, e.g. ``"domino"``.
        feature_layers: target layers whose hidden states :meth:`observe` wants;
            :data:`~knockon.models.decoder.FINAL_HIDDEN` is the one after the final norm.
        block_size: rows that :meth:`propose` writes to pages past the verified length.
        max_positions: positions that its rotary table covers.
    """

    @property
    def name(self) -> str: ...

    @property
    def feature_layers(self) -> tuple[int, ...]: ...

    @property
    def block_size(self) -> int: ...

    @property
    def kv_shape(self) -> KVShape: ...

    def bind_kv(self, num_slots: int) -> None:
        """Allocate draft KV for that many slots, indexed as the target's are."""
        ...

    def observe(self, features: Tensor, tokens: Tensor, plan: BlockPlan) -> None:
        """Write the draft KV of rows that the target has just run.

        Args:
            features: ``[B, T, len(feature_layers) * H]``.
            tokens: ``[B, T]`` int64, the tokens of those rows.
            plan: the positions and slots of that forward.
        """
        ...

    def propose(self, bonus: Tensor, plan: BlockPlan, steps: int) -> Tensor:
        """Up to ``block_size - 1`` tokens to follow ``bonus``.

        Args:
            bonus: ``[B]`` int64, the token at each request's position ``n``.
            plan: the block's rows at ``n .. n + block_size - 1``.
            steps: proposals wanted.

        Returns:
            ``[B, steps]`` int64, equal on all ranks.
        """
        ...

    def exchange_for(self, batch: int, steps: int) -> Exchange | None:
        """How a block of this size crosses ranks, from sizes alone; ``None`` without a rollout."""
        ...

    def report(self) -> DraftReport:
        """What is to be told. Reads the device and takes a collective: all ranks call together."""
        ...
