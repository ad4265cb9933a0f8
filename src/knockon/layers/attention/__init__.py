"""Attention over paged keys and values."""

from knockon.layers.attention.base import (
    CAUSAL,
    LONE_MULTIPLE,
    NULL_PAGE,
    AttentionBackend,
    BlockPlan,
    PagedKV,
    Visibility,
    plan_block,
)
from knockon.layers.attention.sdpa import SdpaBackend

__all__ = [
    "CAUSAL",
    "LONE_MULTIPLE",
    "NULL_PAGE",
    "AttentionBackend",
    "BlockPlan",
    "PagedKV",
    "SdpaBackend",
    "Visibility",
    "plan_block",
]
