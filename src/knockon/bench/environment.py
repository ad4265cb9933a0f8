"""What a measurement was made on: recorded beside every number."""

from __future__ import annotations

from knockon.engine.environment import environment

__all__ = ["environment"]
