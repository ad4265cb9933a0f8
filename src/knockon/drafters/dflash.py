"""The DFlash drafter: one pass of the backbone, each row's own argmax (arXiv 2602.06036)."""

from __future__ import annotations

import torch
from torch import Tensor

from knockon.drafters.backbone import DFlashBackbone
from knockon.drafters.base import DraftReport, KVShape
from knockon.drafters.config import DraftConfig
from knockon.drafters.proposing_head import ProposingHead
from knockon.layers.attention import AttentionBackend, BlockPlan, PagedKV
from knockon.layers.fused.dispatch import fuses
from knockon.layers.fused.rotate_and_write import rotate_and_write
from knockon.layers.fused.write_context_kv import write_context_kv
from knockon.layers.rotary import RotaryEmbedding, Rotation
from knockon.models.target import Target


class DFlashDrafter:
    """Drafts a block over paged context and proposes each row's most likely token.

    Args:
        config: the drafter's configuration, already held against the target.
        backbone: its loaded layers.
        target: whose embedding and LM head it borrows.
        backend: attention over the draft KV.
        max_positions: positions that requests may reach; the tables get a block's slack beyond.
        proposing: the LM head that chooses; ``None`` for the target's own.
    """

    name = "dflash"

    def __init__(
        self,
        config: DraftConfig,
        backbone: DFlashBackbone,
        target: Target,
        backend: AttentionBackend,
        max_positions: int,
        proposing: ProposingHead | None = None,
    ) -> None:
        self.config = config
        self.backbone = backbone
        self.target = target
        self.backend = backend
        self.proposing = proposing or ProposingHead(target)
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
        self._head_norms = [layer.head_norms() for layer in backbone.draft_layers()]
        self._pages = torch.empty(0)
        self._kv: list[PagedKV] = []
        self._masks = torch.full(
            (1, config.block_size - 1), config.mask_token_id, device=target.device
        )

    def bind_kv(self, num_slots: int) -> None:
        """Allocate draft KV for that many slots, indexed as the target's are."""
        layers, kv_heads, head_dim = self.kv_shape
        # One array for all, so that `observe` writes every layer at once; zeros, as in `PagedKV`.
        shape = (layers, 2, num_slots, kv_heads, head_dim)
        self._pages = torch.zeros(shape, dtype=self.target.dtype, device=self.target.device)
        self._kv = [PagedKV(*pages) for pages in self._pages]

    def observe(self, features: Tensor, tokens: Tensor, plan: BlockPlan) -> None:
        """Project the features of rows just run into every draft layer's keys and values."""
        projected, k_norm = self.backbone.project_context(features)
        rotation = Rotation(self.rotary, plan.positions)
        eps = self.config.backbone.rms_norm_eps
        write_context_kv(projected, k_norm, eps, rotation, plan.slots, self._pages)

    def draft(self, bonus: Tensor, plan: BlockPlan) -> Tensor:
        """Run the block ``[bonus, mask, …, mask]``: ``Z [B, L, H]``.

        The block's own keys and values are written beyond the verified length, where the next
        :meth:`observe` overwrites them.
        """
        ids = torch.cat([bonus.unsqueeze(1), self._masks.expand(bonus.shape[0], -1)], dim=1)
        rotation = Rotation(self.rotary, plan.positions)
        layers = self.backbone.draft_layers()

        def attend(layer: int, qkv: Tensor) -> Tensor:
            kv, visibility = self._kv[layer], self.config.backbone.visibility[layer]
            if fuses(qkv):
                q = rotate_and_write(qkv, rotation, plan.slots, kv, self._head_norms[layer])
            else:
                q, k, v = layers[layer].turned_heads(qkv, rotation)
                self.backend.write(k, v, kv, plan)
            return self.backend.attend(q, kv, plan, visibility)

        return self.backbone(self.target.embed(ids), attend)

    def propose(self, bonus: Tensor, plan: BlockPlan, steps: int) -> Tensor:
        """The argmax of the target's head over ``Z[:, 1:]``; DFlash labels are never shifted."""
        # As one matrix: strided rows would be multiplied request by request.
        z = self.draft(bonus, plan)[:, 1 : 1 + steps].contiguous()
        return self.proposing.argmax(z)

    def exchange_for(self, batch: int, steps: int) -> None:
        """No rollout, no choice: the LM head gathers its logits."""

    def report(self) -> DraftReport:
        """The head that proposes, and what a copy of it takes."""
        return self.proposing.report()
