"""The verdict on a failed run, from evidence in every order in which it may arrive."""

from __future__ import annotations

import pickle
import signal

from knockon.errors import Refused
from knockon.parallel.rank_failure import Death, agreed_error, first_cause, rank_failed
from knockon.parallel.rank_messages import Raised


def raised(rank: int, error: bytes | None = None, summary: str = "RuntimeError: peer") -> Raised:
    return Raised(number=3, rank=rank, summary=summary, traceback="Traceback", error=error)


def test_a_death_outranks_the_exceptions_it_causes() -> None:
    death = Death(1, -signal.SIGKILL)
    assert first_cause([death], [raised(0), raised(2)]) is death


def test_an_abort_is_blamed_only_when_nothing_else_died() -> None:
    abort, exit_code = Death(0, -signal.SIGABRT), Death(2, 1)
    assert first_cause([abort, exit_code], []) is exit_code
    assert first_cause([abort], []) is abort


def test_of_several_exceptions_the_first_is_the_cause() -> None:
    assert first_cause([], [raised(2), raised(0)]).rank == 2


def test_only_a_refusal_that_all_ranks_raised_alike_is_agreed() -> None:
    refusal = pickle.dumps(Refused("top_p", 2.0, "at most 1"))
    same = [raised(rank, refusal, "Refused: top_p") for rank in range(2)]
    assert agreed_error(same, 2) == refusal
    assert agreed_error(same, 3) is None
    assert agreed_error([same[0], raised(1, refusal, "Refused: top_k")], 2) is None
    assert agreed_error([same[0], raised(1)], 2) is None


def test_an_unnamed_signal_is_given_by_number_and_empty_stderr_left_out() -> None:
    error = rank_failed(Death(1, -250), 2, "in 'step'", " \n")
    assert str(error) == "rank 1 of 2 was killed by signal 250 in 'step'"
