"""An engine as one rank of a :class:`~knockon.parallel.launch.RankPool` serves it."""

from __future__ import annotations

from typing import Any

from knockon.engine.assemble import build_engine
from knockon.engine.config import EngineConfig
from knockon.engine.engine import Engine
from knockon.parallel import TorchGroup


def build_worker(rank: int, size: int, process_group: Any, config: EngineConfig) -> Engine:
    """The factory that every rank calls; the pool then calls the engine's methods on all alike."""
    return build_engine(config, TorchGroup(process_group))
