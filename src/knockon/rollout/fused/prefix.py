"""The prefix rows' tokens out of every rank's best: the best key, of equal keys the lowest id."""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from torch import Tensor

from knockon.triton_backend import jit, power_of_two, runs_on, tl


@jit
def _merge(keys, ids, tokens, ranks, key_rank, key_request, token_request, RANKS: tl.constexpr):
    request = tl.program_id(0)
    row = tl.program_id(1)
    rank = tl.arange(0, RANKS)
    real = rank < ranks
    at = rank.to(tl.int64) * key_rank + request * key_request + row
    key = tl.load(keys + at, mask=real, other=-0x80000000).to(tl.int64)
    # Shifted, so that the padding above the ranks stays below every key.
    order = tl.where(real, key + 0x80000001, 0)
    own = tl.load(ids + at, mask=real, other=0x7FFFFFFF)
    chosen = tl.min(tl.where(order == tl.max(order, 0), own, 0x7FFFFFFF), 0)
    tl.store(tokens + request * token_request + row, chosen.to(tl.int64))


def merge_prefix(keys: Tensor, ids: Tensor, tokens: Tensor) -> None:
    """Fill ``tokens[:, :p]``.

    Args:
        keys: each rank's best key of each prefix row, ``[R, B, p]`` int32, rows contiguous.
        ids: their ids, of the same shape and strides.
        tokens: ``[B, T]`` int64.
    """
    ranks, batch, prefix = keys.shape
    if not prefix:
        return
    if not runs_on(keys):
        merge_prefix_plain(keys, ids, tokens)
        return
    _merge[(batch, prefix)](
        keys,
        ids,
        tokens,
        ranks,
        keys.stride(0),
        keys.stride(1),
        tokens.stride(0),
        RANKS=power_of_two(ranks),
    )


def merge_prefix_plain(keys: Tensor, ids: Tensor, tokens: Tensor) -> None:
    """As :func:`merge_prefix`, in PyTorch."""
    best = keys.amax(0, keepdim=True)
    chosen = ids.masked_fill(keys != best, 0x7FFFFFFF).amin(0)
    tokens[:, : keys.shape[2]] = chosen
