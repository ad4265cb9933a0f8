"""What a benchmark of kernels runs on."""

from __future__ import annotations

import torch


def needed_gpu() -> torch.device:
    """The CUDA device.

    Raises:
        SystemExit: there is none; with a line that says so.
    """
    if not torch.cuda.is_available():
        raise SystemExit("error: this times kernels on a GPU, and torch sees no CUDA device here")
    return torch.device("cuda")
