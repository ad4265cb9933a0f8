"""How much device memory a program needs beyond what is there without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from knockon.bench.rollout.variants import Program


class Meter(Protocol):
    """Bytes allocated on a device: now, and at most since ``restart``."""

    def now(self) -> int: ...

    def restart(self) -> None: ...

    def peak(self) -> int: ...


class CudaMeter:
    """Of PyTorch's allocator on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)


def beyond(meter: Meter, make: Callable[[], Program]) -> tuple[Program, int]:
    """A program, and the peak of one of its calls beyond what was allocated before it was made.

    What the first call of such a program allocates for good (a cuBLAS workspace, say) counts for
    none, whichever comes first: a throw-away program is made and called before.
    """
    make()()
    before = meter.now()
    program = make()
    program()
    meter.restart()
    program()
    return program, meter.peak() - before
