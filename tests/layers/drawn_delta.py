"""Inputs of the gated delta rule, drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from knockon.layers.delta_rule import DeltaInputs


def draw_delta_inputs(
    rng: torch.Generator,
    batch: int,
    rows: int,
    sizes: tuple[int, int, int, int],
    speed: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> DeltaInputs:
    """Of key heads, value heads, key and value ``sizes``; states forget at some ``speed``."""
    key_heads, value_heads, key, value = sizes

    def drawn(*shape: int) -> Tensor:
        return torch.randn(batch, rows, *shape, generator=rng, dtype=dtype)

    def unit(x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)

    return DeltaInputs(
        unit(drawn(key_heads, key)) * key**-0.5,
        unit(drawn(key_heads, key)),
        drawn(value_heads, value),
        -speed * drawn(value_heads).exp(),
        drawn(value_heads).sigmoid(),
    )
