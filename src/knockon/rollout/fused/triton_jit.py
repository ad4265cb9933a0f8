"""`triton.jit` where there is Triton; where there is none, the plain twins run."""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None

HAS_TRITON = triton is not None


def jit(function: Any) -> Any:
    """``triton.jit(function)``, or the function itself where it can never be launched."""
    return function if triton is None else triton.jit(function)


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()
