"""When a layer's small operations run as kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from knockon.triton_backend import runs_on


def fuses(x: Tensor) -> bool:
    """Whether operations on ``x`` are fused: by a kernel, which has no gradient and works in FP32.

    With gradients enabled, or inside ``torch.compile``, which fuses by itself, the plain twins run;
    so they do for FP64.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and x.dtype != torch.float64
        and runs_on(x)
    )
