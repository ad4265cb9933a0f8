"""Base logits that a selection can get wrong, by name."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

SPECIAL = (math.nan, -math.nan, -math.inf, math.inf, -0.0, 0.0, 1.0, -1.0)


def normal(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=rng, device=rng.device)


def few_values(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Ties everywhere, the cutoff included."""
    return torch.randint(-3, 4, shape, generator=rng, device=rng.device).float()


def all_equal(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.full(shape, 0.5, device=rng.device)


def special(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """NaNs of both signs, infinities, both zeros."""
    values = torch.tensor(SPECIAL, device=rng.device)
    return values[torch.randint(0, len(SPECIAL), shape, generator=rng, device=rng.device)]


def mostly_minus_inf(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    keep = torch.rand(shape, generator=rng, device=rng.device) < 0.01
    return torch.where(keep, normal(shape, rng), -math.inf)


def zeros_of_both_signs(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    coin = torch.rand(shape, generator=rng, device=rng.device) < 0.5
    return torch.where(coin, -0.0, 0.0)


def clustered(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """The best ids side by side, at the end: every group that holds one holds only such."""
    logits = normal(shape, rng)
    logits[..., -(-shape[-1] * 3 // 4) :] += 50.0
    return logits


def descending(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.linspace(300.0, -300.0, shape[-1], device=rng.device).expand(shape).contiguous()


def one_nan(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    logits = normal(shape, rng)
    logits[-1, -1, shape[-1] // 2] = math.nan
    return logits


HARD: dict[str, Callable[[tuple[int, ...], torch.Generator], Tensor]] = {
    f.__name__: f
    for f in (
        *(normal, few_values, all_equal, special, mostly_minus_inf),
        *(zeros_of_both_signs, clustered, descending, one_nan),
    )
}
