"""Elementwise functions that give an element the same bits wherever it lies.

A CPU's kernels take elements a few vectors at a time and what is left over one by one, with another
implementation of ``exp`` and its like. So an element of a row alone and one of the same row inside
a block may differ in their last bit, unless every row fills whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

_MULTIPLE = 64  # elements; two vectors of the widest kind hold 32 of FP32


def by_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function(x)`` for ``x [..., n]``, on a CPU with rows padded to whole vectors."""
    if x.device.type != "cpu":
        return function(x)
    return function(F.pad(x, (0, -x.shape[-1] % _MULTIPLE)))[..., : x.shape[-1]]
