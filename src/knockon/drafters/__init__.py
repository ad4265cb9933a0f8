"""Drafters: each turns verified state into proposals."""

from knockon.drafters.base import Drafter, KVShape

__all__ = ["Drafter", "KVShape"]
