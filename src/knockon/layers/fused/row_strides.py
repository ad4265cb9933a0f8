"""How rows that are parts of longer ones lie in memory, as far as it is known before a launch."""

from __future__ import annotations

import math

from torch import Tensor

_MOST = 16  # elements: as far as it helps a kernel's loads


def common_divisor(x: Tensor) -> int:
    """The largest power of two, up to 16, that divides the strides of ``x [B, T, C]``'s rows.

    Triton would find it out for each stride alone, and only whether it is 16: rows of another
    length, as some ranks have them, would be read element by element.
    """
    return math.gcd(x.stride(0), x.stride(1), _MOST)
