"""Root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from knockon.errors import Refused
from knockon.layers.fused.add_rms_norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension, statistics in FP32.

    Args:
        zero_centred: the checkpoint's weight is what is to be added to one. The sum is kept in
            FP32, since near one a narrower weight would lose most of its bits.
    """

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, zero_centred: bool = False
    ) -> None:
        super().__init__()
        self.eps = eps
        self.shape = (size,)
        self.zero_centred = zero_centred
        kept = torch.promote_types(dtype, torch.float32) if zero_centred else dtype
        self.weight = nn.Parameter(torch.ones(size, dtype=kept), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """``x + delta`` (``x`` itself without one) and its norm; ``x`` is left as it is."""
        return add_rms_norm(x, delta, self.weight, self.eps)

    def load(self, full: Tensor) -> None:
        """Copy ``full [size]``."""
        if tuple(full.shape) != self.shape:
            raise Refused("norm shape", tuple(full.shape), f"{self.shape}")
        with torch.no_grad():
            self.weight.copy_(full)
            if self.zero_centred:
                self.weight.add_(1)
