"""Where two greedy answers first differ, and whether the target nearly had a tie there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# One rounding of a BF16 logit between 16 and 32, twice: how far apart two sums may be rounded.
NEAR = 0.25

Answers = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Difference:
    """The first place where an answer to a prompt is another than the target's.

    Attributes:
        answer, at: which prompt's, at which of its tokens.
        tokens: the target's and the other; ``None`` where an answer had ended.
        margin: by how much the target prefers its own, in log-probability; ``None`` where it was
            not told for one of the two.
    """

    answer: int
    at: int
    tokens: tuple[int | None, int | None]
    margin: float | None

    @property
    def near_tie(self) -> bool:
        """Whether rounding alone can have turned it."""
        return self.margin is not None and abs(self.margin) <= NEAR


def judge(
    alone: Answers,
    others: Answers,
    gaps: Sequence[tuple[int, int]],
    logprobs: Sequence[Mapping[int, float]],
) -> list[Difference]:
    """The differences at ``gaps``, with the target's log-probabilities at each."""
    found = []
    for (answer, at), row in zip(gaps, logprobs, strict=True):
        ours, theirs = (a[answer][at] if at < len(a[answer]) else None for a in (alone, others))
        known = [None if token is None else row.get(token) for token in (ours, theirs)]
        margin = None if known[0] is None or known[1] is None else known[0] - known[1]
        found.append(Difference(answer, at, (ours, theirs), margin))
    return found
