"""Attention over paged keys and values."""

from knockon.layers.attention.base import (
    LONE_MULTIPLE,
    NULL_PAGE,
    AttentionBackend,
    BlockPlan,
    PagedKV,
    Visibility,
    plan_block,
)
from knockon.layers.attention.paged import PagedBackend
from knockon.layers.attention.sdpa import SdpaBackend

__all__ = [
    "LONE_MULTIPLE",
    "NULL_PAGE",
    "AttentionBackend",
    "BlockPlan",
    "PagedBackend",
    "PagedKV",
    "SdpaBackend",
    "Visibility",
    "plan_block",
]
