"""How the kernels of paged attention are launched: a pure function of sizes."""

from __future__ import annotations

from dataclasses import dataclass

from knockon.errors import Refused
from knockon.triton_backend import power_of_two

MOST_HEAD_DIM = 256
# Positions a request of a verified or drafted block; more of them are a prompt's.
MOST_BLOCK_ROWS = 16
_MOST_SPLITS = 128
# Bytes of a block of keys: enough of them in flight to hide memory, few enough for registers.
_BLOCK_BYTES = 16384
# Requests times KV heads from which a block's tile is small.
_MANY_PAIRS = 1024
# Query rows, over the heads of a group.
_SHORT_PROMPT = 2048


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

    Up to ``MOST_BLOCK_ROWS`` positions they add up a row alike, however many there are.

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
    block_n = _block_keys(dim, itemsize)
    pairs = batch * kv_heads
    if rows <= MOST_BLOCK_ROWS:
        block_m = verify_tile(pairs, dim, itemsize)
        # Of sizes that are the same at every width. At least a program a multiprocessor.
        wanted = -(-multiprocessors // pairs)
    else:
        block_m = _prompt_tile(packed, pairs, dim, itemsize, multiprocessors)
        if block_m == 128:
            block_n = min(block_n, 64)
        wanted = multiprocessors // (pairs * -(-packed // block_m))
    splits = max(1, min(wanted, -(-capacity // block_n), _MOST_SPLITS))
    programs = pairs * -(-packed // block_m) * splits
    return AttentionLaunch(
        block_m=block_m,
        block_n=block_n,
        splits=splits,
        warps=8 if block_m == 128 or (block_m == 64 and dim == 256) else 4,
        # Few programs keep more blocks each in flight; of many, more fit on a multiprocessor.
        stages=3 if block_m >= 64 or programs <= 2 * multiprocessors else 2,
    )


def verify_tile(pairs: int, dim: int, itemsize: int) -> int:
    """Rows a program for blocks of up to ``MOST_BLOCK_ROWS`` positions, whatever their number.

    So that a row rounds alike at every verify width: from 64 rows on a Hopper GPU multiplies by
    another instruction than below, whose sums differ. Reading keys takes most of the time, so one
    row wastes little in a tile of 64, and 16 positions of 4 heads fill it. In batches of hundreds,
    which decode one position, it wastes a quarter of a small model's step.

    Args:
        pairs: requests times KV heads.
        dim: of a head, rounded up to a power of two.
        itemsize: bytes of an element; FP32 has no tensor cores.
    """
    return 64 if pairs <= _MANY_PAIRS and dim <= 128 and itemsize < 4 else 16


def _block_keys(dim: int, itemsize: int) -> int:
    """Keys at a time."""
    if itemsize == 4:
        # No tensor cores: each thread holds whole rows of both factors, so tiles are small.
        return 16
    return min(128, max(16, _BLOCK_BYTES // (dim * itemsize)))


def _prompt_tile(packed: int, pairs: int, dim: int, itemsize: int, multiprocessors: int) -> int:
    """Rows a program where there are many: as many as fit, fewer where programs would be few."""
    if itemsize == 4:
        return 16
    # Two tiles of 64 rows on a multiprocessor beat one of 128 until contexts are long.
    most = 128 if dim <= 128 and packed > _SHORT_PROMPT else 64
    if pairs * -(-packed // 128) < multiprocessors:
        most = 64
    return min(max(16, power_of_two(packed)), most)
