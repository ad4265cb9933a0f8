"""The Domino drafter: a DFlash block straightened into a causal chain (arXiv 2605.29707)."""

from __future__ import annotations

from torch import Tensor

from knockon.drafters.base import DraftReport
from knockon.drafters.dflash import DFlashDrafter
from knockon.layers.attention import BlockPlan
from knockon.rollout import DominoRollout
from knockon.rollout.exchange import Exchange


class DominoDrafter:
    """The backbone's block, then the rollout over it.

    Args:
        backbone: a DFlash drafter, which keeps the draft KV and makes ``Z``.
        rollout: turns ``Z`` and the bonus token into a chain.
    """

    name = "domino"

    def __init__(self, backbone: DFlashDrafter, rollout: DominoRollout) -> None:
        self.backbone = backbone
        self.rollout = rollout
        self.feature_layers = backbone.feature_layers
        self.block_size = backbone.block_size
        self.kv_shape = backbone.kv_shape

    def bind_kv(self, num_slots: int) -> None:
        """Allocate draft KV for that many slots."""
        self.backbone.bind_kv(num_slots)

    def observe(self, features: Tensor, tokens: Tensor, plan: BlockPlan) -> None:
        """Write the draft KV of rows that the target has just run."""
        self.backbone.observe(features, tokens, plan)

    def propose(self, bonus: Tensor, plan: BlockPlan, steps: int) -> Tensor:
        """Draft, then roll out ``steps`` proposals ``[B, steps]``."""
        return self.rollout(self.backbone.draft(bonus, plan), bonus, steps=steps)

    def exchange_for(self, batch: int, steps: int) -> Exchange:
        """The exchange that the rollout takes for a block of this size."""
        return self.rollout.exchange_for(batch, steps)

    def report(self) -> DraftReport:
        """The rollout's facts; NaN rows are those of all ranks' shards together."""
        nan_rows = self.rollout.nan_rows.clone()
        self.rollout.group.all_reduce(nan_rows)
        return self.backbone.report()._replace(
            pool_size=self.rollout.pool_size,
            implementation=self.rollout.implementation,
            why_plain=self.rollout.why_plain,
            exchange=self.rollout.exchange,
            gate_table_bytes=self.rollout.gate_table_bytes,
            nan_rows=int(nan_rows),
        )
