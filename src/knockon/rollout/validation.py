"""What one rank can refuse by itself when a rollout is made."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from knockon.errors import Refused
from knockon.parallel import Group, VocabShard
from knockon.rollout.exchange import EXCHANGES
from knockon.rollout.fp8_head import FP8Head
from knockon.rollout.head import FLOAT_DTYPES, DominoHead

LMHeadLike = Tensor | Callable[[Tensor], Tensor]


def refuse_inputs(
    head: DominoHead,
    embedding: Tensor,
    lm_head: LMHeadLike,
    shard: VocabShard,
    group: Group,
    pool_size: int,
    exchange: str,
) -> None:
    """Check weights against the shard and the shard against the group.

    Raises:
        Refused: naming the field, what was found and what is wanted.
    """
    if (shard.rank, shard.size) != (group.rank, group.size):
        raise Refused(
            "shard (rank, size)",
            (shard.rank, shard.size),
            f"the group's {(group.rank, group.size)}",
        )
    if head.vocab_size != shard.vocab_size:
        raise Refused(
            "head.correction_out rows",
            head.vocab_size,
            f"vocab_size = {shard.vocab_size}",
            "Added vocabulary is not supported",
        )
    refuse_settings(pool_size, exchange)
    _refuse_matrix("embedding", embedding, head)
    if isinstance(lm_head, Tensor):
        _refuse_matrix("lm_head", lm_head, head)
        if lm_head.shape[0] != shard.num_padded:
            raise Refused("lm_head rows", lm_head.shape[0], f"num_padded = {shard.num_padded}")
    else:
        refuse_callable(lm_head, head, shard)


def refuse_callable(lm_head: object, head: DominoHead, shard: VocabShard) -> None:
    """Check an LM head that is no tensor: what an FP8 one says of itself; others are called.

    Raises:
        Refused: an FP8 head of other sizes or another dtype, or what cannot be called.
    """
    if not callable(lm_head):
        raise Refused("lm_head", type(lm_head).__name__, "a tensor or a callable")
    if isinstance(lm_head, FP8Head):
        found = (lm_head.num_rows, lm_head.hidden_size)
        wanted = (shard.num_padded, head.hidden_size)
        if found != wanted:
            raise Refused("lm_head shape", found, f"(num_padded, H) = {wanted}")
        if lm_head.dtype != head.dtype:
            raise Refused("lm_head dtype", lm_head.dtype, f"{head.dtype}, as the head")


def refuse_settings(pool_size: int, exchange: str) -> None:
    """Check what may differ between rollouts that share one head.

    Raises:
        Refused: ``pool_size`` that is no number of ids, or an unknown exchange.
    """
    if not isinstance(pool_size, int) or isinstance(pool_size, bool) or pool_size < 0:
        raise Refused("pool_size", pool_size, "0 for the whole vocabulary, or more")
    if exchange not in EXCHANGES:
        raise Refused("exchange", exchange, f"one of {EXCHANGES}")


def holds_whole_embedding(embedding: Tensor, shard: VocabShard, sharded: bool | None) -> bool:
    """Whether ``embedding`` has the row of every id, not only this rank's.

    Args:
        sharded: what the caller says, or ``None`` to go by the number of rows.

    Raises:
        Refused: rows that fit neither, or that fit both while the caller does not say which.
    """
    rows = embedding.shape[0]
    fits_whole = rows == shard.vocab_size
    fits_shard = rows in (shard.num_org, shard.num_padded)
    if shard.size == 1 and (fits_whole or fits_shard):
        return True
    if not ((fits_whole and sharded is not True) or (fits_shard and sharded is not False)):
        raise Refused(
            "embedding rows",
            rows,
            f"V = {shard.vocab_size}, or this rank's num_padded = {shard.num_padded}",
        )
    if fits_whole and fits_shard and sharded is None:
        raise Refused(
            "embedding rows",
            rows,
            "a number that tells the whole embedding from a padded shard",
            "Say which it is with sharded_embedding",
        )
    return fits_whole and not sharded


def _refuse_matrix(name: str, weight: Tensor, head: DominoHead) -> None:
    if weight.dim() != 2 or weight.shape[1] != head.hidden_size:
        raise Refused(f"{name} shape", tuple(weight.shape), f"[rows, H = {head.hidden_size}]")
    if weight.dtype not in FLOAT_DTYPES:
        raise Refused(f"{name} dtype", weight.dtype, "a floating dtype without scales")
    if (weight.dtype == torch.float64) != (head.dtype == torch.float64):
        raise Refused(
            f"{name} dtype",
            weight.dtype,
            f"FP64 throughout or not at all; the head is {head.dtype}",
        )
    if weight.device != head.device:
        raise Refused(f"{name} device", str(weight.device), f"{head.device}, as the head")
