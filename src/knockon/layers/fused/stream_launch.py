"""How a linear layer of few rows is launched: what was measured to beat cuBLAS, and nothing else.

``benchmarks/linear.py`` prints entries of :data:`MEASURED`. One launch serves every number of rows
up to 16, so that a row is rounded alike decoded alone and verified in a block.
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


_SPLIT = StreamLaunch(block_n=64, block_k=128, splits=2, stages=6)

# (n, k, bytes an element) to pairs of the most rows served and the launch, fewest rows first.
# On an H200, shapes of Qwen3-8B; microseconds of 16 rows beside cuBLAS's.
Table = dict[tuple[int, int, int], tuple[tuple[int, StreamLaunch], ...]]
MEASURED: Table = {
    (6144, 4096, 2): ((16, StreamLaunch(64, 128, splits=2, stages=4, tma=True)),),  # 15.4, 16.7
    (4096, 4096, 2): ((16, _SPLIT),),  # 11.1, 13.2
    (4096, 12288, 2): ((16, _SPLIT),),  # 26.5, 28.5
    (151936, 4096, 2): ((16, StreamLaunch(64, 128, stages=4)),),  # 279.8, 292.5
}
# The same for a gate and its input, the gate applied: n counts the rows of both.
MEASURED_GATED: Table = {
    (24576, 4096, 2): ((16, StreamLaunch(64, 64, stages=4, tma=True)),),  # 48.9, 50.4
}


def linear_launch(
    m: int, n: int, k: int, itemsize: int, gated: bool = False
) -> StreamLaunch | None:
    """Settings for ``m`` rows times a weight ``[n, k]``; ``None`` leaves them to cuBLAS."""
    for most, launch in (MEASURED_GATED if gated else MEASURED).get((n, k, itemsize), ()):
        if m <= most:
            return launch
    return None
