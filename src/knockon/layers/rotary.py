"""Rotary position embedding: frequencies of the four scaling kinds in use, tables, rotation.

Layout is rotate-half (NeoX, Hugging Face): dimension ``i`` is paired with ``i + rotary_dim / 2``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeConfig:
    """What fixes the rotation angles of a model.

    Args:
        theta: base of the frequencies.
        kind: how they are scaled. ``linear`` (position interpolation) divides all by ``factor``;
            ``llama3`` (Llama 3.1 model card) divides the slow ones and blends between
            ``low_freq_factor`` and ``high_freq_factor``; ``yarn`` (arXiv 2309.00071) blends between
            ``beta_fast`` and ``beta_slow`` rotations over ``original_max_positions``.
        attention_factor: YaRN's factor on cos and sin; ``None`` derives it from ``factor`` and,
            when both are given, ``mscale`` and ``mscale_all_dim``.
        truncate: whether YaRN rounds its blending range outwards to whole dimensions.
        partial_rotary_factor: share of each head, from its start, that is rotated.
        frequency_divisors: one divisor a frequency (``rope_freqs`` of GGUF files), applied last.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    frequency_divisors: tuple[float, ...] | None = None

    def rotary_dim(self, head_dim: int) -> int:
        """Dimensions of a head that are rotated."""
        return int(head_dim * self.partial_rotary_factor)

    def attention_scaling(self) -> float:
        """Factor on cos and sin (1 for every kind but YaRN)."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _yarn_mscale(self.factor, self.mscale) / _yarn_mscale(
                self.factor, self.mscale_all_dim
            )
        return _yarn_mscale(self.factor, 1.0)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of every rotated pair, FP32 ``[rotary_dim / 2]``, slowest last.

    The order of FP32 operations is that of ``transformers``, so that the tables agree bit for bit.
    """
    dim = rope.rotary_dim(head_dim)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    if rope.kind == "yarn":
        frequencies = _yarn(rope, dim, rope.theta**exponents)
    else:
        frequencies = 1.0 / (rope.theta**exponents)
        if rope.kind == "linear":
            frequencies = frequencies / rope.factor
        elif rope.kind == "llama3":
            frequencies = _llama3(rope, frequencies)
    if rope.frequency_divisors is not None:
        frequencies = frequencies / torch.tensor(rope.frequency_divisors, dtype=torch.float32)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    context = _original_max_positions(rope)
    wavelengths = 2 * math.pi / frequencies
    longest_kept = context / rope.high_freq_factor
    shortest_divided = context / rope.low_freq_factor
    smooth = (context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelengths > shortest_divided, frequencies / rope.factor, frequencies)
    medium = (wavelengths >= longest_kept) & (wavelengths <= shortest_divided)
    return torch.where(medium, blended, scaled)


def _yarn(rope: RopeConfig, dim: int, periods: Tensor) -> Tensor:
    context = _original_max_positions(rope)

    def dimension_turning(rotations: float) -> float:
        """The (fractional) pair that turns this many times over the original context."""
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp has no width: keep the division finite
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _original_max_positions(rope: RopeConfig) -> int:
    if rope.original_max_positions is None:
        raise ValueError(f"RopeConfig of kind {rope.kind!r} needs original_max_positions")
    return rope.original_max_positions


class RotaryEmbedding:
    """cos and sin tables of a model, gathered once per forward and shared by its layers.

    Args:
        rope: the angles.
        head_dim: size of an attention head.
        max_positions: rows of the tables. Whoever builds this adds the slack a speculative block
            needs past the context limit; a position beyond the table is an error of indexing
            (an exception on a CPU, a device assertion on a GPU), never a clamped angle.
        device: where the tables live.
    """

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        max_positions: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.rope = rope
        self.head_dim = head_dim
        self.max_positions = max_positions
        self.rotary_dim = rope.rotary_dim(head_dim)
        angles = torch.outer(
            torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(rope, head_dim)
        )
        scaling = rope.attention_scaling()
        cos, sin = angles.cos() * scaling, angles.sin() * scaling
        # rotate_half([a, b]) = [-b, a]: with the sign in the table, one roll does the rest.
        self.cos = torch.cat((cos, cos), -1).to(device)
        self.sin = torch.cat((-sin, sin), -1).to(device)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the rows of these positions.

        Args:
            positions: int64 ``[...]``, below ``max_positions``.

        Returns:
            cos and sign-folded sin, FP32 ``[..., 1, rotary_dim]``, to broadcast over heads.
        """
        shape = (*positions.shape, 1, self.rotary_dim)
        rows = positions.reshape(-1)
        cos, sin = self.cos.index_select(0, rows), self.sin.index_select(0, rows)
        return cos.view(shape), sin.view(shape)

    def apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """:func:`apply_rotary`."""
        return apply_rotary(x, cos, sin)


class Rotation:
    """The rotation of one forward's rows: called on heads ``[B, T, heads, D]``, it turns them.

    Args:
        rotary: the model's tables.
        positions: ``[B, T]`` int64, below their ``max_positions``.
    """

    def __init__(self, rotary: RotaryEmbedding, positions: Tensor) -> None:
        self.rotary = rotary
        self.positions = positions

    @cached_property
    def tables(self) -> tuple[Tensor, Tensor]:
        """The rows' cos and sin, gathered when first used and shared by the layers."""
        return self.rotary.tables(self.positions)

    def __call__(self, heads: Tensor) -> Tensor:
        return apply_rotary(heads, *self.tables)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads.

    Args:
        x: ``[..., heads, head_dim]``, any strides (query and key heads may go in together).
        cos, sin: ``[..., 1, rotary_dim]`` from :meth:`RotaryEmbedding.tables`; dimensions of a
            head past ``rotary_dim`` stay as they are.

    Returns:
        A new tensor of ``x``'s shape and dtype; the arithmetic is FP32 (FP64 for FP64 heads).
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim != x.shape[-1]:
        turned = apply_rotary(x[..., :rotary_dim], cos, sin)
        return torch.cat((turned, x[..., rotary_dim:]), -1)
    wide = x if x.dtype == torch.float64 else x.float()
    return torch.addcmul(wide * cos, wide.roll(rotary_dim // 2, -1), sin).to(x.dtype)
