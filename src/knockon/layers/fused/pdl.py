"""Programmatic dependent launch: a kernel begins while the one before it in the stream drains.

A kernel launched this way may start once every program of its predecessor has either ended or said
:func:`tl.extra.cuda.gdc_launch_dependents`; ``gdc_wait`` holds it until the predecessor has ended
and its writes are visible. In between only what does not depend on earlier kernels may happen:
address arithmetic, and reading weights or bringing them to the L2 cache.

Why nothing is read too early or overwritten too early, kernels ``A, B, C`` in stream order:

* Every program of a kernel launched this way calls :func:`follow` exactly once, before its first
  load of data, its first store, and any return. So ``B`` cannot end before ``A`` has: ``C``, which
  waits for ``B`` alone, finds all of ``A`` done as well, and so on back through the stream. Reads
  of older results are safe, and so are writes to memory that the caching allocator took from a
  tensor that an older kernel still read.
* :func:`follow` lets the next kernel start only after its own wait. So whatever ``C`` does before
  its wait runs beside ``B`` alone, never beside ``A``.
* A kernel launched plainly (cuBLAS, PyTorch, a memory copy) waits for everything before it, and
  lets its successor start only as it ends.
"""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from knockon.triton_backend import interpreted, jit, runs_on, tl, triton


def pdl(x: Tensor) -> dict[str, Any]:
    """Launch options of a kernel with a ``PDL`` parameter, on the device of ``x``.

    ``KNOCKON_PDL=0`` turns the whole of it off.
    """
    if runs_on(x) and not interpreted() and _supported(x.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@lru_cache
def _supported(device: torch.device) -> bool:
    return (
        os.environ.get("KNOCKON_PDL", "1") != "0"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and _triton_launches()
    )


def _triton_launches() -> bool:
    """Whether this Triton has the launch option and both instructions (3.4 and later)."""
    try:
        from triton.backends.nvidia.compiler import CUDAOptions
    except ImportError:
        return False
    cuda = getattr(getattr(triton.language, "extra", None), "cuda", None)
    return "launch_pdl" in CUDAOptions.__dataclass_fields__ and hasattr(cuda, "gdc_wait")


@jit
def follow(PDL: tl.constexpr):
    """Wait for the kernel before this one, then let the one after it start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
