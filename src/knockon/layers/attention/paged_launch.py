"""How the kernels of paged attention are launched: a pure function of sizes."""

from __future__ import annotations

from dataclasses import dataclass

from knockon.errors import Refused
from knockon.triton_backend import power_of_two

MOST_HEAD_DIM = 256
_MOST_SPLITS = 128
# Bytes of a block of keys: enough of them in flight to hide memory, few enough for registers.
_BLOCK_BYTES = 16384


@dataclass(frozen=True)
class AttentionLaunch:
    """Launch settings of one attention call.

    Attributes:
        block_m: query rows a program, a row being one query head of one position; power of two.
        block_n: keys at a time, power of two.
        splits: programs that share a context.
        warps, stages: of the attention kernel.
    """

    block_m: int
    block_n: int
    splits: int
    warps: int
    stages: int


def attention_launch(
    batch: int,
    rows: int,
    group: int,
    kv_heads: int,
    head_dim: int,
    capacity: int,
    itemsize: int,
    multiprocessors: int,
) -> AttentionLaunch:
    """Settings for ``rows`` positions of each of ``batch`` requests.

    Args:
        group: query heads per KV head.
        capacity: positions that the page table has room for, whatever the actual contexts are: a
            captured launch serves them all.
        itemsize: bytes of a key's element.
        multiprocessors: of the device.

    Raises:
        Refused: a head size that the kernels do not hold in registers.
    """
    if head_dim > MOST_HEAD_DIM:
        raise Refused("head_dim", head_dim, f"at most {MOST_HEAD_DIM} for the paged kernels")
    dim = max(16, power_of_two(head_dim))
    packed = rows * group
    if itemsize == 4:
        # No tensor cores: each thread holds whole rows of both factors, so tiles are small.
        block_m, block_n = 16, 16
    else:
        block_m = min(max(16, power_of_two(packed)), 128 if dim <= 128 else 64)
        halves = batch * kv_heads * -(-packed // 128) < multiprocessors and packed > 128
        if block_m == 128 and halves:
            block_m = 64
        block_n = min(128, max(16, _BLOCK_BYTES // (dim * itemsize)))
        if block_m == 128:
            block_n = min(block_n, 64)
    programs = batch * kv_heads * -(-packed // block_m)
    # Two programs a multiprocessor while their partial sums are small beside what they read.
    wanted = multiprocessors * (2 if packed <= 16 else 1) // programs
    splits = max(1, min(wanted, -(-capacity // block_n), _MOST_SPLITS))
    return AttentionLaunch(
        block_m=block_m,
        block_n=block_n,
        splits=splits,
        warps=8 if block_m == 128 or (block_m == 64 and dim == 256) else 4,
        stages=3,
    )
