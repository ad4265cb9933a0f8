"""The small operations of a Llama forward, fused: a Triton kernel each, beside its plain twin.

The public functions choose by device: the kernel where the tensor lives on a GPU, the twin
elsewhere. Bulk generation and feature extraction spend most of their time between matrix products
in these operations, and one launch each is what lets a decode step of a small model run at the
speed of its arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from knockon.train import triton_kernels as kernels


def on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def add_rms_norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``residual += x`` in place, then RMSNorm of it.

    Args:
        x: ``[N, H]`` to be added, or None.
        residual: ``[N, H]``, contiguous, updated in place.
        weight: ``[H]``.

    Returns:
        ``[N, H]`` normed rows in the residual's dtype; the mean of squares is taken in FP32.
    """
    if on_gpu(residual):
        return kernels.add_rms_norm(x, residual, weight, eps)
    return add_rms_norm_twin(x, residual, weight, eps)


def add_rms_norm_twin(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x is not None:
        residual.add_(x)
    wide = residual.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(residual.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[N, 2I]`` rows (gate first) -> ``[N, I]``."""
    if on_gpu(gate_up):
        return kernels.silu_mul(gate_up)
    return silu_mul_twin(gate_up)


def silu_mul_twin(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rope_and_store(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    key_out: Tensor,
    value_out: Tensor,
    offsets: Tensor,
    head_stride: int,
) -> Tensor:
    """Rotates queries and keys and writes keys and values where they are kept.

    Args:
        qkv: ``[N, (heads + 2 kv_heads) * head_dim]`` rows of query, key, value.
        positions: ``[N]`` int64.
        cos, sin: ``[P, head_dim / 2]`` FP32 tables.
        heads: number of query heads.
        key_out, value_out: any contiguous storage; head ``h`` of row ``n`` starts at element
            ``offsets[n] + h * head_stride``.
        offsets: ``[N]`` int64 element offsets.
        head_stride: elements between two heads of one row.

    Returns:
        Rotated queries ``[N, heads, head_dim]``.
    """
    run = kernels.rope_and_store if on_gpu(qkv) else rope_and_store_twin
    return run(qkv, positions, cos, sin, heads, key_out, value_out, offsets, head_stride)


def rope_and_store_twin(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    key_out: Tensor,
    value_out: Tensor,
    offsets: Tensor,
    head_stride: int,
) -> Tensor:
    half = cos.shape[1]
    rows = qkv.view(qkv.shape[0], -1, 2 * half)
    kv_heads = (rows.shape[1] - heads) // 2
    turn_cos, turn_sin = cos[positions][:, None], sin[positions][:, None]
    low, high = rows[:, : heads + kv_heads].float().split(half, dim=-1)
    turned = torch.cat((low * turn_cos - high * turn_sin, high * turn_cos + low * turn_sin), -1).to(
        qkv.dtype
    )
    at = (
        offsets[:, None, None]
        + torch.arange(kv_heads, device=qkv.device)[None, :, None] * head_stride
    )
    at = at + torch.arange(2 * half, device=qkv.device)
    key_out.view(-1)[at] = turned[:, heads:]
    value_out.view(-1)[at] = rows[:, heads + kv_heads :]
    return turned[:, :heads].contiguous()


def decode_attention(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """One query token of each sequence against its own cache, grouped-query heads.

    Args:
        query: ``[B, heads, head_dim]``.
        keys, values: ``[B, kv_heads, S, head_dim]``.
        lengths: ``[B]`` int64, the index of the newest key: keys ``0 .. lengths[b]`` are seen.

    Returns:
        ``[B, heads * head_dim]``.
    """
    if on_gpu(query):
        return kernels.decode_attention(query, keys, values, lengths)
    return decode_attention_twin(query, keys, values, lengths)


def decode_attention_twin(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    batch, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.view(batch, kv_heads, heads // kv_heads, head_dim)
    seen = torch.arange(keys.shape[2], device=query.device) <= lengths[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=seen[:, None, None]
    )
    return out.reshape(batch, heads * head_dim)


def sample(logits: Tensor, temperature: Tensor, min_p: float, seed: Tensor) -> Tensor:
    """Next tokens: the argmax (lowest id of a tie) at temperature 0, else a Gumbel-max draw.

    Args:
        logits: ``[B, V]``.
        temperature: ``[B]`` FP32.
        min_p: tokens less likely than ``min_p`` times the likeliest one (after the temperature) are
            never drawn.
        seed: int64 scalar tensor; the caller changes it between steps.

    Returns:
        ``[B]`` int64.
    """
    if on_gpu(logits):
        return kernels.sample(logits, temperature, min_p, seed)
    return sample_twin(logits, temperature, min_p, seed)


def sample_twin(logits: Tensor, temperature: Tensor, min_p: float, seed: Tensor) -> Tensor:
    wide = logits.float()
    greedy = wide.argmax(-1)
    warm = temperature > 0
    if not bool(warm.any()):
        return greedy
    generator = torch.Generator(device=logits.device).manual_seed(int(seed))
    noise = torch.empty_like(wide).exponential_(generator=generator).log_().neg_()
    scaled = (wide - wide.amax(-1, keepdim=True)) / torch.where(warm, temperature, 1.0)[:, None]
    floor = torch.tensor(min_p, device=logits.device).log()
    drawn = (scaled + noise).masked_fill(scaled < floor, float("-inf")).argmax(-1)
    return torch.where(warm, drawn, greedy)
