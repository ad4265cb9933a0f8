"""Which rank is to blame when a run ends, and the error that says so: pure functions."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from knockon.errors import RankFailed
from knockon.parallel.rank_messages import Raised


@dataclass(frozen=True, slots=True)
class Death:
    """A rank's process ended by itself. ``status`` as `subprocess.Popen.returncode` gives it."""

    rank: int
    status: int

    def describe(self) -> str:
        if self.status >= 0:
            return f"ended with exit code {self.status}"
        try:
            return f"was killed by {signal.Signals(-self.status).name}"
        except ValueError:
            return f"was killed by signal {-self.status}"


def first_cause(deaths: Sequence[Death], raised: Sequence[Raised]) -> Death | Raised:
    """The likeliest cause among what was seen, each sequence in the order of its being noticed.

    A death goes before any exception, since ranks that lose a peer raise out of their collective;
    for the same reason an abort (how NCCL's watchdog leaves) goes after every other death.
    """
    if deaths:
        return min(deaths, key=lambda death: death.status == -signal.SIGABRT)
    return raised[0]


def agreed_error(raised: Sequence[Raised], size: int) -> bytes | None:
    """The pickled Knockon error that *all* ranks raised alike, or None.

    Such an error (a refusal) leaves the ranks in step: it is the caller's answer, not a failure.
    """
    same = {report.summary for report in raised}
    if len(raised) == size and len(same) == 1 and all(report.error for report in raised):
        return raised[0].error
    return None


def rank_failed(cause: Death | Raised, size: int, doing: str, stderr: str) -> RankFailed:
    """The error for the caller: rank, what happened to it, in which method, traceback, stderr."""
    where = f"rank {cause.rank} of {size}"
    if isinstance(cause, Death):
        text = f"{where} {cause.describe()} {doing}"
    else:
        text = f"{where} raised {doing}: {cause.summary}\n\n{cause.traceback.rstrip()}"
    return RankFailed(_with_stderr(text, stderr))


def ranks_silent(waiting: Sequence[int], size: int, what: str, timeout: float) -> RankFailed:
    """The error for a call whose time is over: the ranks that have not answered."""
    names = ", ".join(map(str, waiting))
    noun = "rank" if len(waiting) == 1 else "ranks"
    return RankFailed(f"{noun} {names} of {size} did not finish {what} within {timeout:g} s")


def _with_stderr(text: str, stderr: str) -> str:
    return f"{text}\n\nIts last lines on stderr:\n{stderr.rstrip()}" if stderr.strip() else text
