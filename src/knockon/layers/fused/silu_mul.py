"""The gate of a gated MLP (SwiGLU, Shazeer, arXiv 2002.05202)."""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from knockon.layers.fused.dispatch import fuses
from knockon.layers.fused.pdl import follow, pdl
from knockon.triton_backend import jit, power_of_two, tl

_BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``gate_up [..., 2 * I]``, the gate's half first: ``[..., I]``."""
    if fuses(gate_up):
        return silu_mul_kernel(gate_up)
    return silu_mul_plain(gate_up)


def silu_mul_plain(gate_up: Tensor) -> Tensor:
    """The twin of :func:`silu_mul_kernel`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_mul_kernel(gate_up: Tensor) -> Tensor:
    """:func:`silu_mul` in one launch."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], size))
    block = min(_BLOCK, power_of_two(size))
    if out.numel():
        gate_rows[(out.numel() // size, -(-size // block))](
            gate_up, out, size, BLOCK=block, num_warps=max(1, block // 256), **pdl(out)
        )
    return out


@jit
def gate_rows(gate_up, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A block of one row of ``out [rows, size]``."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    source = gate_up + row * (2 * size) + at
    gate = tl.load(source, mask=live, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=live, other=0.0).to(tl.float32)
    # Rounded in between, as two operations round.
    opened = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + at, (opened * up).to(out.dtype.element_ty), mask=live)
