"""Triton kernels for bulk decoding. `decode_kernels` holds their signatures and plain twins."""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without Triton runs the twins
    triton = None
    tl = None


def jit(function: Any) -> Any:
    """`triton.jit` where there is Triton."""
    return function if triton is None else triton.jit(function)


def power_of_two(n: int) -> int:
    """The least one that is at least `n`."""
    return 1 << (n - 1).bit_length()


@jit
def _add_rms_norm(x, residual, weight, out, size, eps, HAS_X: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(residual + row * size + at, mask=inside, other=0.0)
    if HAS_X:
        value = (
            value.to(tl.float32)
            + tl.load(x + row * size + at, mask=inside, other=0.0).to(tl.float32)
        ).to(value.dtype)
        tl.store(residual + row * size + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    normed = (wide * scale).to(value.dtype).to(tl.float32)
    normed *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, normed.to(value.dtype), mask=inside)


def add_rms_norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, size = residual.shape
    out = torch.empty_like(residual)
    _add_rms_norm[(rows,)](
        residual if x is None else x,
        residual,
        weight,
        out,
        size,
        eps,
        HAS_X=x is not None,
        BLOCK=power_of_two(size),
        num_warps=4,
    )
    return out


@jit
def _silu_mul(gate_up, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    tl.store(out + row * size + at, (silu * up.to(tl.float32)).to(gate.dtype), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    block = min(2048, power_of_two(size))
    _silu_mul[(rows, triton.cdiv(size, block))](gate_up, out, size, BLOCK=block, num_warps=4)
    return out


@jit
def _rope_and_store(
    qkv,
    positions,
    cos,
    sin,
    query,
    keys,
    values,
    offsets,
    head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, TILE)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    inside = head < HEADS + 2 * KV_HEADS
    source = qkv + row * (HEADS + 2 * KV_HEADS) * 2 * HALF + head * 2 * HALF + lane
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + HALF, mask=inside, other=0.0)
    position = tl.load(positions + row)
    turn_cos = tl.load(cos + position * HALF + lane)
    turn_sin = tl.load(sin + position * HALF + lane)
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    turned_low = (wide_low * turn_cos - wide_high * turn_sin).to(low.dtype)
    turned_high = (wide_high * turn_cos + wide_low * turn_sin).to(low.dtype)

    is_query = head < HEADS
    to = query + row * HEADS * 2 * HALF + head * 2 * HALF + lane
    tl.store(to, turned_low, mask=is_query)
    tl.store(to + HALF, turned_high, mask=is_query)
    start = tl.load(offsets + row)
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    to = keys + start + (head - HEADS) * head_stride + lane
    tl.store(to, turned_low, mask=is_key)
    tl.store(to + HALF, turned_high, mask=is_key)
    is_value = (head >= HEADS + KV_HEADS) & inside
    to = values + start + (head - HEADS - KV_HEADS) * head_stride + lane
    tl.store(to, low, mask=is_value)
    tl.store(to + HALF, high, mask=is_value)


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
    rows, half = qkv.shape[0], cos.shape[1]
    total = qkv.shape[1] // (2 * half)
    query = qkv.new_empty(rows, heads, 2 * half)
    _rope_and_store[(rows,)](
        qkv,
        positions,
        cos,
        sin,
        query,
        key_out,
        value_out,
        offsets,
        head_stride,
        HEADS=heads,
        KV_HEADS=(total - heads) // 2,
        HALF=half,
        TILE=power_of_two(total),
        num_warps=2,
    )
    return query


@jit
def _decode_attention(
    query,
    keys,
    values,
    lengths,
    out,
    scale,
    capacity,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    batch = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    member = tl.arange(0, TILE)
    lane = tl.arange(0, DIM)
    where_q = (batch * KV_HEADS + kv_head) * GROUP * DIM + member[:, None] * DIM + lane[None, :]
    q = tl.load(query + where_q, mask=member[:, None] < GROUP, other=0.0)
    seen = tl.load(lengths + batch) + 1
    base = (batch * KV_HEADS + kv_head) * capacity * DIM
    best = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, DIM], tl.float32)
    for start in range(0, seen, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < seen
        k = tl.load(
            keys + base + at[:, None] * DIM + lane[None, :], mask=inside[:, None], other=0.0
        )
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(inside[None, :], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        weight = tl.exp2(score - new_best[:, None])
        fade = tl.exp2(best - new_best)
        v = tl.load(
            values + base + at[:, None] * DIM + lane[None, :], mask=inside[:, None], other=0.0
        )
        total = total * fade + tl.sum(weight, 1)
        acc = acc * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        best = new_best
    tl.store(out + where_q, (acc / total[:, None]).to(q.dtype), mask=member[:, None] < GROUP)


def decode_attention(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    batch, heads, dim = query.shape
    kv_heads, capacity = keys.shape[1], keys.shape[2]
    out = torch.empty_like(query)
    _decode_attention[(batch, kv_heads)](
        query,
        keys,
        values,
        lengths,
        out,
        math.log2(math.e) / math.sqrt(dim),
        capacity,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        DIM=dim,
        BLOCK=64,
        TILE=max(16, power_of_two(heads // kv_heads)),
        num_warps=4,
        num_stages=3,
    )
    return out.view(batch, heads * dim)


@jit
def _sample(logits, temperature, seed, out, vocab, log_min_p, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = tl.full([BLOCK], 0, tl.int32) + vocab
    for start in range(0, vocab, BLOCK):
        at = start + lane
        value = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf")).to(
            tl.float32
        )
        better = value > best
        best = tl.where(better, value, best)
        index = tl.where(better, at, index)
    top = tl.max(best, 0)
    chosen = tl.min(tl.where(best == top, index, vocab), 0)
    warmth = tl.load(temperature + row)
    if warmth > 0:
        noise_seed = tl.load(seed)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        index = tl.full([BLOCK], 0, tl.int32) + vocab
        for start in range(0, vocab, BLOCK):
            at = start + lane
            value = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf")).to(
                tl.float32
            )
            scaled = (value - top) / warmth
            uniform = tl.maximum(tl.rand(noise_seed, (row * vocab + at).to(tl.int32)), 1e-10)
            noisy = tl.where(scaled >= log_min_p, scaled - tl.log(-tl.log(uniform)), float("-inf"))
            better = noisy > best
            best = tl.where(better, noisy, best)
            index = tl.where(better, at, index)
        chosen = tl.min(tl.where(best == tl.max(best, 0), index, vocab), 0)
    tl.store(out + row, chosen.to(tl.int64))


def sample(logits: Tensor, temperature: Tensor, min_p: float, seed: Tensor) -> Tensor:
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    log_min_p = math.log(min_p) if min_p > 0 else -1e30
    block = min(4096, power_of_two(vocab))
    _sample[(rows,)](logits, temperature, seed, out, vocab, log_min_p, BLOCK=block, num_warps=8)
    return out
