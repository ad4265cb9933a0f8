"""Traces of a width policy's steps: recorded, kept as JSON lines, replayed."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from knockon.engine.width import WidthPolicy
from knockon.errors import Refused


@dataclass(frozen=True)
class WidthStep:
    """One decode step: requests, the width run, the accept length of each that speculates, the
    step's time."""

    batch: int
    width: int
    accept_lengths: list[int]
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens that the step gained; one of each request that does not speculate."""
        return sum(self.accept_lengths) + self.batch - len(self.accept_lengths)


class TracedWidth:
    """A policy whose steps are kept, in ``steps``; it decides as the one it holds."""

    def __init__(self, policy: WidthPolicy) -> None:
        self.policy = policy
        self.name = policy.name
        self.widths = policy.widths
        self.steps: list[WidthStep] = []

    def choose(self, batch: int, speculating: int) -> int:
        return self.policy.choose(batch, speculating)

    def record(self, batch: int, width: int, accept_lengths: Sequence[int], seconds: float) -> None:
        self.steps.append(WidthStep(batch, width, list(accept_lengths), seconds))
        self.policy.record(batch, width, accept_lengths, seconds)


def replay(steps: Iterable[WidthStep], policy: WidthPolicy, lag: int = 0) -> list[int]:
    """What a fresh policy would have chosen before each step, told of the steps as they ran.

    Args:
        lag: steps that were in flight when one was chosen: it was told of none of them.
    """
    chosen = []
    untold: deque[WidthStep] = deque()
    for step in steps:
        chosen.append(policy.choose(step.batch, len(step.accept_lengths)))
        untold.append(step)
        if len(untold) > lag:
            told = untold.popleft()
            policy.record(told.batch, told.width, told.accept_lengths, told.seconds)
    return chosen


def write_trace(steps: Iterable[WidthStep], path: Path) -> None:
    """One JSON object a line; floats are written so that they read back the same."""
    path.write_text("".join(json.dumps(asdict(step)) + "\n" for step in steps), "utf-8")


def read_trace(path: Path) -> list[WidthStep]:
    """The steps of a trace.

    Raises:
        Refused: no file that can be read, a line that is not a step.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused("replay", str(path), f"a readable UTF-8 file ({error})") from None
    steps = []
    for number, line in enumerate(lines, 1):
        try:
            step = WidthStep(**json.loads(line))
            valid = (
                0 < len(step.accept_lengths) <= step.batch
                and all(1 <= length <= step.width for length in step.accept_lengths)
                and step.seconds > 0
            )
        except (TypeError, ValueError):
            valid = False
        if not valid:
            raise Refused(
                f"{path} line {number}",
                line[:60],
                "batch, width, accept_lengths (1 to width, at most one a request) and seconds",
            )
        steps.append(step)
    return steps
