"""What a variant needs beyond what is there without it, on an allocator that is counted by hand."""

from __future__ import annotations

import pytest
import torch

from knockon.bench.rollout.memory import beyond
from knockon.bench.rollout.rank import lone_rank
from knockon.bench.rollout.settings import settle
from knockon.bench.rollout.variants import Variant

WORKSPACE = 32


class CountedByHand:
    """A meter; the first call of any program allocates a workspace for good."""

    def __init__(self) -> None:
        self.held = self.highest = 100
        self.has_workspace = False

    def now(self) -> int:
        return self.held

    def restart(self) -> None:
        self.highest = self.held

    def peak(self) -> int:
        return self.highest


class Counted:
    """A program that holds ``holds`` while it lives, and ``needs`` more while it is called."""

    def __init__(self, meter: CountedByHand, holds: int, needs: int) -> None:
        self.meter, self.holds, self.needs = meter, holds, needs
        meter.held += holds

    def __del__(self) -> None:
        self.meter.held -= self.holds

    def __call__(self) -> torch.Tensor:
        if not self.meter.has_workspace:
            self.meter.has_workspace = True
            self.meter.held += WORKSPACE
        self.meter.highest = max(self.meter.highest, self.meter.held + self.needs)
        return torch.zeros(3, 2)


def test_a_lasting_workspace_is_charged_to_no_variant() -> None:
    meter = CountedByHand()
    extras = [beyond(meter, lambda: Counted(meter, 0, 7))[1] for _ in range(2)]
    assert extras == [7, 7]
    assert meter.now() == 100 + WORKSPACE


def test_what_a_program_holds_for_itself_is_its_own() -> None:
    """As stage A holds ``W2`` in FP32, from its making on."""
    meter = CountedByHand()
    program, extra = beyond(meter, lambda: Counted(meter, 50, 7))
    assert extra == 57
    assert meter.now() == 100 + WORKSPACE + 50
    del program


def test_the_benchmark_charges_no_stage_with_what_the_first_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = lone_rank(settle(device="cpu", shape="tiny", batches=(1,)))
    rank.open_batch(1)
    meter = CountedByHand()
    rank._meter = meter
    monkeypatch.setattr(rank, "_program", lambda variant: Counted(meter, 0, 5))
    monkeypatch.setattr(rank, "_tokens", lambda variant, output: output)
    found = [rank.prepare(Variant(stage)).extra_bytes for stage in ("base", "B", "base")]
    assert found == [5, 5, 5]
