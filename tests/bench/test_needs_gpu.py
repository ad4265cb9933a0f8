"""Benchmarks of kernels say in one line that there is nothing to run them on."""

from __future__ import annotations

import pytest
import torch

from knockon.bench.needs_gpu import needed_gpu


def test_without_a_gpu_it_ends_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        needed_gpu()


def test_with_one_it_is_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert needed_gpu() == torch.device("cuda")
