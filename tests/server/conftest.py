"""One real server on tiny checkpoints for all tests of a process, and the same model offline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from knockon.engine.llm import LLM
from tests.engine.conftest import tiny as tiny
from tests.engine.generation import TinyShelf, load
from tests.server.running import KEY, NAME, ServerProcess

RUNNING, QUEUED = 4, 12


@pytest.fixture(scope="session")
def tiny_arguments(tiny: TinyShelf) -> list[str]:
    """Options that name the tiny target and its drafter."""
    return [
        *("--model-path", str(tiny.target()), "--served-model-name", NAME),
        *("--speculative-draft-model-path", str(tiny.drafter("domino"))),
        *("--dtype", "float32", "--api-key", KEY),
    ]


@pytest.fixture(scope="session")
def server(
    tiny_arguments: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Serves 4 sequences at once and queues 12."""
    log: Path = tmp_path_factory.mktemp("server") / "log"
    limits = ["--max-running-requests", str(RUNNING), "--max-queued-requests", str(QUEUED)]
    with ServerProcess(log, *tiny_arguments, *limits) as started:
        yield started.wait_ready()


@pytest.fixture(scope="session")
def offline(tiny: TinyShelf) -> Iterator[LLM]:
    """What the server must agree with."""
    with load(tiny.target(), tiny.drafter("domino")) as llm:
        yield llm
