"""What a GPU's server takes for weights and KV is its own share, whoever else is on the GPU."""

from __future__ import annotations

import pytest
import torch

from knockon.engine.memory import free_for_kv

GIB = 1 << 30


@pytest.mark.parametrize(
    ("fraction", "own", "free", "workspace", "found"),
    [
        (0.88, 16, 84, 1, 72),  # alone
        (0.25, 5, 94, 1, 20),  # the first of several
        (0.25, 5, 44, 1, 20),  # after others have taken theirs: the same
        (0.88, 5, 20, 2, 15),  # no more than is free
        (0.05, 16, 84, 1, 0),  # the weights fill the share
    ],
)
def test_kv_gets_the_rest_of_the_share_that_is_free(
    monkeypatch: pytest.MonkeyPatch,
    fraction: float,
    own: int,
    free: int,
    workspace: int,
    found: int,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: own * GIB)
    left = free_for_kv(torch.device("cuda"), fraction, workspace * GIB)
    assert left // GIB == found
