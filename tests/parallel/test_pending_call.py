"""An interrupt ends the waiting for a call, not the call."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from knockon.errors import Refused
from knockon.parallel.launch import RankPool
from tests.parallel import rank_workers


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, rank_workers.build, threads_per_rank=1, timeout=60) as started:
        yield started


class Interrupt(BaseException):
    """As an interrupt does, it gets past ``except Exception``."""


@pytest.fixture
def interrupted_soon() -> Iterator[None]:
    """A signal while the main thread waits."""

    def interrupt(number: int, frame: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    yield
    timer.join()
    signal.signal(signal.SIGUSR1, before)


def test_its_result_is_there_for_whoever_asks_again(pool: RankPool, interrupted_soon: None) -> None:
    call = pool.start("echo_late", [7])
    with pytest.raises(Interrupt):
        call.result()
    assert pool.call("add", 1) == 3  # what is sent next follows it
    assert call.result() == [7]
    assert call.result() is call.result()


def test_a_refusal_is_raised_when_it_is_asked_for(pool: RankPool) -> None:
    call = pool.start("refuse", -1)
    assert pool.call("add", 0) == 1
    for _ in range(2):
        with pytest.raises(Refused, match="max_tokens"):
            call.result()
