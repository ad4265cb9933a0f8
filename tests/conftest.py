"""What all tests share: one thread a process, GPU tests only where there is one, the real model."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch is imported anywhere: several test processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# Before Triton is imported anywhere: without a device its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings

from knockon.errors import Refused
from knockon.models import catalog

pytest_plugins = ["tests.models.fake_index"]

# The machine's load decides how long an example takes; pytest-timeout catches what hangs.
settings.register_profile("knockon", deadline=None)
settings.load_profile("knockon")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The pulled SmolLM2-135M GGUF file; tests that use it are skipped where it was not pulled."""
    try:
        return catalog.resolve("smollm2-135m")
    except Refused as refused:
        pytest.skip(f"the real model is not here: {refused}")
