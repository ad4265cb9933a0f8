"""Rounds of calls are counted and timed as asked."""

from __future__ import annotations

import torch

from knockon.bench.replay import median_us

CPU = torch.device("cpu")


class Counted:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        sum(range(20_000))


def test_every_round_has_its_calls_and_one_ahead() -> None:
    run = Counted()
    assert median_us(run, CPU, replays=4, rounds=3) > 1
    assert run.calls == 3 * (4 + 1)


def test_a_round_has_as_many_calls_as_fill_its_time_and_at_least_three() -> None:
    short, long = Counted(), Counted()
    median_us(short, CPU, rounds=1, seconds=0)
    assert short.calls == 4 + 4
    median_us(long, CPU, rounds=1, seconds=0.05)
    assert long.calls > short.calls
