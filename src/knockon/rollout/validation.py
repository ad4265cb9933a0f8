"""What one rank can refuse by itself, when a rollout is made and when a block is rolled out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from knockon.errors import Refused
from knockon.parallel import Group, VocabShard
from knockon.rollout.exchange import EXCHANGES
from knockon.rollout.fp8_head import FP8Head
from knockon.rollout.head import FLOAT_DTYPES, DominoHead
from knockon.rollout.layout import refuse_gaps

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
        if lm_head.device != head.device:
            raise Refused("lm_head device", str(lm_head.device), f"{head.device}, as the head")


def refuse_settings(pool_size: int, exchange: str) -> None:
    """Check what may differ between rollouts that share one head.

    Raises:
        Refused: ``pool_size`` that is no number of ids, or an unknown exchange.
    """
    if not isinstance(pool_size, int) or isinstance(pool_size, bool) or pool_size < 0:
        raise Refused("pool_size", pool_size, "an int: 0 for the whole vocabulary, or more")
    if exchange not in EXCHANGES:
        raise Refused("exchange", exchange, f"one of {EXCHANGES}")


def refuse_shards(shards: Sequence[VocabShard], own: VocabShard) -> None:
    """Check a caller's list of all ranks' shards against this rank's own.

    Raises:
        Refused: another number of shards than ranks, an own entry that is not ``own``, or shards
            that do not cover the vocabulary in rank order.
    """
    kinds = {type(shard).__name__ for shard in shards} - {VocabShard.__name__}
    if kinds:
        raise Refused("shards", ", ".join(sorted(kinds)), "a VocabShard of every rank")
    if len(shards) != own.size:
        raise Refused("shards", f"{len(shards)} of them", f"one for each of {own.size} ranks")
    if shards[own.rank] != own:
        raise Refused(f"shards[{own.rank}]", shards[own.rank], f"this rank's shard, {own}")
    refuse_gaps(shards)


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


def refuse_block(
    head: DominoHead, draft_hidden: Tensor, bonus: Tensor, steps: int | None
) -> tuple[int, int]:
    """``B`` and the number of proposals of one call, by what the host knows of its arguments.

    Raises:
        Refused: shapes, dtypes or devices that do not fit, or more steps than rows.
    """
    _refuse_other_than_tensor("draft_hidden", draft_hidden)
    _refuse_other_than_tensor("bonus", bonus)
    if draft_hidden.dim() != 3 or (draft_hidden.shape[1] == 0 and steps is None):
        raise Refused("draft_hidden shape", tuple(draft_hidden.shape), "[B, L, H], L at least 1")
    batch, length, hidden_size = draft_hidden.shape
    if hidden_size != head.hidden_size:
        raise Refused("draft_hidden width", hidden_size, f"H = {head.hidden_size}")
    _refuse_precision("draft_hidden", draft_hidden, head)
    if draft_hidden.device != head.device:
        raise Refused("draft_hidden device", str(draft_hidden.device), f"{head.device}, the head's")
    if tuple(bonus.shape) != (batch,):
        raise Refused("bonus shape", tuple(bonus.shape), f"[B = {batch}]")
    if bonus.dtype not in (torch.int64, torch.int32):
        raise Refused("bonus dtype", bonus.dtype, "torch.int64")
    if bonus.device != draft_hidden.device:
        raise Refused("bonus device", str(bonus.device), f"{draft_hidden.device}, as draft_hidden")
    most = length if head.shift_label else max(0, length - 1)
    if steps is None:
        steps = length - 1
    if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps <= most:
        raise Refused("steps", steps, f"an int from 0 to {most} for {length} drafted rows")
    return batch, steps


def refuse_logits(logits: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Check what an LM head gave.

    Raises:
        Refused: no tensor, another shape or another dtype.
    """
    _refuse_other_than_tensor("lm_head output", logits)
    if tuple(logits.shape) != shape:
        raise Refused("lm_head output shape", tuple(logits.shape), f"{shape}")
    if logits.dtype != dtype:
        raise Refused("lm_head output dtype", logits.dtype, f"{dtype}, as the head")


def dtype_number(dtype: torch.dtype | None) -> int:
    """Place of a dtype among those that weights may have; -1 for any other."""
    return FLOAT_DTYPES.index(dtype) if dtype in FLOAT_DTYPES else -1


def _refuse_other_than_tensor(name: str, found: object) -> None:
    if not isinstance(found, Tensor):
        raise Refused(name, type(found).__name__, "a tensor")


def _refuse_matrix(name: str, weight: Tensor, head: DominoHead) -> None:
    _refuse_other_than_tensor(name, weight)
    if weight.dim() != 2 or weight.shape[1] != head.hidden_size:
        raise Refused(f"{name} shape", tuple(weight.shape), f"[rows, H = {head.hidden_size}]")
    _refuse_precision(name, weight, head)
    if weight.device != head.device:
        raise Refused(f"{name} device", str(weight.device), f"{head.device}, as the head")


def _refuse_precision(name: str, x: Tensor, head: DominoHead) -> None:
    if x.dtype not in FLOAT_DTYPES:
        raise Refused(f"{name} dtype", x.dtype, "a floating dtype without scales")
    if (x.dtype == torch.float64) != (head.dtype == torch.float64):
        raise Refused(
            f"{name} dtype",
            x.dtype,
            f"FP64 throughout or not at all; the head is {head.dtype}",
        )
