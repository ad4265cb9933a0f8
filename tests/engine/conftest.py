"""Tiny checkpoints, made once a test process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.generation import TinyShelf


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyShelf:
    """Tiny targets and drafters on disk."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    return TinyShelf(folder)
