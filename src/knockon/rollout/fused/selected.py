"""What one rank contributes to a block's exchange."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Selected(NamedTuple):
    """One rank's best tokens of the prefix rows and its offers to the candidate pool.

    Attributes:
        prefix_keys: ``[B, p]`` int32, the key of each prefix row's best logit.
        prefix_ids: ``[B, p]`` int32, its id, the lowest of ties.
        pool_keys: ``[B, k]`` int32, keys of ``max over corrected rows``.
        pool_ids: ``[B, k]`` int32, ascending.

    Ids are those of the whole vocabulary. What lies past the shard's own ids is a sentinel: key
    :data:`~knockon.rollout.fused.keys.SENTINEL` and the id of a row of padding.
    """

    prefix_keys: Tensor
    prefix_ids: Tensor
    pool_keys: Tensor
    pool_ids: Tensor
