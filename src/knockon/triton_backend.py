"""Triton where it is installed: the modules that hold kernels import it from here."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without Triton runs the plain twins
    triton = None
    tl = None

HAS_TRITON = triton is not None


def jit(function: Any = None, **options: Any) -> Any:
    """``triton.jit`` where there is Triton; as a decorator, with or without options."""
    if function is None:
        return partial(jit, **options)
    return function if triton is None else triton.jit(function, **options)


def runs_on(tensor: Tensor) -> bool:
    """Whether kernels can be launched on the device of ``tensor``."""
    return triton is not None and tensor.is_cuda


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on any device."""
    return triton is not None and os.environ.get("TRITON_INTERPRET") == "1"


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n``, and at least 1."""
    return 1 << max(0, n - 1).bit_length()
