"""Qwen3 (dense): query and key heads are RMS-normed, each over its own dimensions, before RoPE."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from knockon.errors import Refused
from knockon.layers.fused.rotate_and_write import HeadNorm
from knockon.models.config import ModelConfig
from knockon.models.decoder_layer import AttentionLayer
from knockon.models.strict import Loader
from knockon.parallel import Group, HeadShard


class Qwen3Layer(AttentionLayer):
    """The decoder layer with per-head norms."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        heads: HeadShard,
        dtype: torch.dtype,
        group: Group,
    ) -> None:
        super().__init__(config, index, heads, dtype, group)
        self.eps = config.rms_norm_eps
        # One row a head, query heads first: both norms in one multiplication.
        shape = (heads.head_count + heads.kv_count, config.head_dim)
        self.zero_centred = config.zero_centred_norms
        kept = torch.promote_types(dtype, torch.float32) if self.zero_centred else dtype
        self.head_norm = nn.Parameter(torch.ones(shape, dtype=kept), requires_grad=False)

    def head_norms(self) -> HeadNorm:
        """``x / sqrt(mean(x²) + eps)`` over each head, times its norm's weight."""
        return HeadNorm(self.head_norm, self.eps)

    def loaders(self) -> dict[str, Loader]:
        """The shared ones and the two norms."""
        queries = self.heads.head_count

        def q_norm(full: Tensor) -> None:
            self._load_norm(full, slice(None, queries))

        def k_norm(full: Tensor) -> None:
            self._load_norm(full, slice(queries, None))

        return super().loaders() | {
            "self_attn.q_norm.weight": q_norm,
            "self_attn.k_norm.weight": k_norm,
        }

    def _load_norm(self, full: Tensor, rows: slice) -> None:
        if tuple(full.shape) != (self.head_dim,):
            raise Refused("norm shape", tuple(full.shape), f"{(self.head_dim,)}")
        with torch.no_grad():
            self.head_norm[rows] = full.to(self.head_norm)
            if self.zero_centred:
                self.head_norm[rows] += 1
