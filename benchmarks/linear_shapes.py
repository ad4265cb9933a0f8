"""What ``benchmarks/linear.py`` multiplies, and the launches that it tries."""

from __future__ import annotations

from dataclasses import dataclass

from knockon.layers.fused.stream_launch import StreamLaunch


@dataclass(frozen=True)
class Shape:
    """A weight ``[n, k]`` and how many small kernels stand before it in a decoder layer."""

    name: str
    n: int
    k: int
    ahead: int = 1
    gated: bool = False

    @property
    def bytes(self) -> int:
        return 2 * self.n * self.k


QKV = Shape("qkv", 6144, 4096)
OUTPUT = Shape("o", 4096, 4096, ahead=3)
GATE_UP = Shape("gate_up", 24576, 4096)
GATED = Shape("gate_up+silu", 24576, 4096, gated=True)
DOWN = Shape("down", 4096, 12288)
HEAD = Shape("head", 151936, 4096)
IN_LAYER = (QKV, OUTPUT, GATE_UP, DOWN)
SHAPES = (*IN_LAYER, GATED, HEAD)

# block_n, block_k, stages, warps
FEW_ROWS = [
    (16, 256, 5, 4),
    (32, 128, 6, 4),
    (32, 256, 4, 4),
    (64, 64, 8, 4),
    (64, 128, 4, 4),
    (64, 128, 6, 4),
    (128, 64, 4, 4),
    (128, 128, 3, 8),
]
MORE_ROWS = [(64, 64, 6, 4), (64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 3, 8)]


def candidates(shape: Shape, m: int) -> list[StreamLaunch]:
    found = []
    width = shape.n // 2 if shape.gated else shape.n
    for block_n, block_k, stages, warps in FEW_ROWS if m <= 16 else MORE_ROWS:
        if shape.gated and block_n * block_k > 64 * 128:
            continue
        tiles = width // block_n
        splits = [s for s in (1, 2, 3, 4, 6, 8) if shape.k % (block_k * s) == 0]
        splits = [s for s in splits if 128 <= tiles * s <= 800][:3] or [1]
        for split in splits:
            for tma in (False, True):
                if tma and block_n < 32:
                    continue
                depth = max(2, stages // 2) if shape.gated else stages
                launch = StreamLaunch(block_n, block_k, split, warps, depth, tma, 1024)
                found.append(launch)
    return found
