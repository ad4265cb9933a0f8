"""The DFlash drafter: one pass of the backbone, each row's own argmax (arXiv 2602.06036)."""

from __future__ import annotations

import torch
from torch import Tensor

from knockon.drafters.backbone import DFlashBackbone
from knockon.drafters.base import DraftReport, KVShape
from knockon.drafters.config import DraftConfig
from knockon.layers.attention import AttentionBackend, BlockPlan, PagedKV
from knockon.layers.rotary import RotaryEmbedding
from knockon.models.target import Target
from knockon.rollout import FP8Head, order


class DFlashDrafter:
    """Drafts a block over paged context and proposes each row's most likely token.

    Args:
        config: the drafter's configuration, already held against the target.
        backbone: its loaded layers.
        target: whose embedding and LM head it borrows.
        backend: attention over the draft KV.
        max_positions: positions that requests may reach; the tables get a block's slack beyond.
        fp8_head: a copy of the target's LM head to propose with; ``None`` for the head itself.
    """

    name = "dflash"

    def __init__(
        self,
        config: DraftConfig,
        backbone: DFlashBackbone,
        target: Target,
        backend: AttentionBackend,
        max_positions: int,
        fp8_head: FP8Head | None = None,
    ) -> None:
        self.config = config
        self.backbone = backbone
        self.target = target
        self.backend = backend
        self.fp8_head = fp8_head
        self.feature_layers = config.target_layer_ids
        self.block_size = config.block_size
        self.rotary = RotaryEmbedding(
            config.backbone.rope,
            config.backbone.head_dim,
            max_positions + 2 * config.block_size,
            target.device,
        )
        self.kv_shape = KVShape(
            config.backbone.num_layers, backbone.kv_heads, config.backbone.head_dim
        )
        self._kv: list[PagedKV] = []
        self._masks = torch.full(
            (1, config.block_size - 1), config.mask_token_id, device=target.device
        )

    def bind_kv(self, num_slots: int) -> None:
        """Allocate draft KV for that many slots, indexed as the target's are."""
        layers, kv_heads, head_dim = self.kv_shape
        self._kv = [
            PagedKV.allocate(num_slots, kv_heads, head_dim, self.target.dtype, self.target.device)
            for _ in range(layers)
        ]

    def observe(self, features: Tensor, tokens: Tensor, plan: BlockPlan) -> None:
        """Project the features of rows just run into every draft layer's keys and values."""
        cos, sin = self.rotary.tables(plan.positions)
        k, v = self.backbone.context_kv(features, cos, sin)
        for layer, kv in enumerate(self._kv):
            self.backend.write(k[:, :, layer], v[:, :, layer], kv, plan)

    def draft(self, bonus: Tensor, plan: BlockPlan) -> Tensor:
        """Run the block ``[bonus, mask, …, mask]``: ``Z [B, L, H]``.

        The block's own keys and values are written beyond the verified length, where the next
        :meth:`observe` overwrites them.
        """
        ids = torch.cat([bonus.unsqueeze(1), self._masks.expand(bonus.shape[0], -1)], dim=1)
        cos, sin = self.rotary.tables(plan.positions)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.backend.write(k, v, self._kv[layer], plan)
            visibility = self.config.backbone.visibility[layer]
            return self.backend.attend(q, self._kv[layer], plan, visibility)

        return self.backbone(self.target.embed(ids), cos, sin, attend)

    def propose(self, bonus: Tensor, plan: BlockPlan, steps: int) -> Tensor:
        """The argmax of the target's head over ``Z[:, 1:]``; DFlash labels are never shifted."""
        z = self.draft(bonus, plan)[:, 1 : 1 + steps]
        if self.fp8_head is None:
            return order.argmax(self.target.logits(z))
        return order.argmax(self.target.lm_head.gather(self.fp8_head(z)))

    def exchange_for(self, batch: int, steps: int) -> None:
        """No rollout, no choice: the LM head gathers its logits."""

    def report(self) -> DraftReport:
        """The head that proposes, and what a copy of it takes."""
        if self.fp8_head is None:
            return DraftReport(head_dtype=str(self.target.dtype).removeprefix("torch."))
        return DraftReport(head_dtype="fp8", head_bytes=self.fp8_head.num_bytes)
