"""Root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knockon.errors import Refused
from knockon.layers.fused.add_rms_norm import add_rms_norm


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension, statistics in FP32."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.shape = (size,)
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)

    def add(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """``x + delta`` (``x`` itself without one) and its norm; ``x`` is left as it is."""
        return add_rms_norm(x, delta, self.weight, self.eps)

    def load(self, full: Tensor) -> None:
        """Copy ``full [size]``."""
        if tuple(full.shape) != self.shape:
            raise Refused("norm shape", tuple(full.shape), f"{self.shape}")
        with torch.no_grad():
            self.weight.copy_(full)
