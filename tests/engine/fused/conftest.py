"""The kernels run compiled where there is a device and in Triton's interpreter elsewhere."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def kernel_device() -> torch.device:
    pytest.importorskip("triton", reason="the kernels need Triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
