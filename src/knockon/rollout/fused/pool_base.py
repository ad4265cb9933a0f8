"""Base logits of a pool's ids out of one rank's shard, zero where another rank holds the id."""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from torch import Tensor

from knockon.triton_backend import jit, power_of_two, runs_on, tl


@jit
def _own_logits(local, ids, out, start, num_org, pool, rows_step, rows_row, BLOCK: tl.constexpr):
    request = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    batch = tl.num_programs(0)
    k = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    real = k < pool
    position = tl.load(ids + request * pool + k, mask=real, other=0) - start
    own = real & (position >= 0) & (position < num_org)
    at = local + row * rows_step + request * rows_row + position
    tl.store(out + (row * batch + request) * pool + k, tl.load(at, mask=own, other=0.0), mask=real)


def own_pool_base(local: Tensor, ids: Tensor, start: int, num_org: int) -> Tensor:
    """``[C, B, K]`` in the logits' dtype; summed over the ranks they are the pool's base logits.

    Args:
        local: this rank's base logits of the corrected rows ``[C, B, N]``.
        ids: ``[B, K]`` int32.
        start: id of the shard's first row.
        num_org: ids that the shard holds.
    """
    if not runs_on(local):
        return own_pool_base_plain(local, ids, start, num_org)
    rows, batch, _ = local.shape
    pool = ids.shape[1]
    out = local.new_empty((rows, batch, pool))
    block = min(1024, power_of_two(pool))
    _own_logits[(batch, rows, -(-pool // block))](
        local, ids, out, start, num_org, pool, local.stride(0), local.stride(1), BLOCK=block
    )
    return out


def own_pool_base_plain(local: Tensor, ids: Tensor, start: int, num_org: int) -> Tensor:
    """As :func:`own_pool_base`, in PyTorch."""
    position = ids.long() - start
    foreign = (position < 0) | (position >= num_org)
    position = position.clamp(0, local.shape[-1] - 1)
    base = local.gather(-1, position.expand(local.shape[0], -1, -1))
    return base.masked_fill_(foreign, 0.0)
