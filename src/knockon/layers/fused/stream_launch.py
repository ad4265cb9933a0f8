"""How a linear layer of few rows is launched: what was measured to beat cuBLAS, and nothing else.

``benchmarks/linear.py`` prints entries of :data:`MEASURED`.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_ROWS = 64


@dataclass(frozen=True)
class StreamLaunch:
    """Launch settings of one product ``[m, k] x [n, k]ᵀ``.

    Attributes:
        block_n: weight rows a program, power of two of at least 16.
        block_k: columns at a time, power of two of at least 32.
        splits: programs that share a block of weight rows, each a part of the columns.
        warps: of a program.
        stages: of the software pipeline: one less blocks of the weight are on their way.
        tma: whether blocks of the weight are fetched by the copy engine.
        prefetch: bytes of each weight row, from the program's first column on, that are asked for
            before the kernel waits for the one before it; rounded up to 512 times a power of two.
    """

    block_n: int
    block_k: int
    splits: int = 1
    warps: int = 4
    stages: int = 4
    tma: bool = False
    prefetch: int = 0


# (n, k, bytes an element) to pairs of the most rows served and the launch, fewest rows first.
MEASURED: dict[tuple[int, int, int], tuple[tuple[int, StreamLaunch], ...]] = {}


def linear_launch(m: int, n: int, k: int, itemsize: int) -> StreamLaunch | None:
    """Settings for ``m`` rows times a weight ``[n, k]``; ``None`` leaves them to cuBLAS."""
    for most, launch in MEASURED.get((n, k, itemsize), ()):
        if m <= most:
            return launch
    return None
