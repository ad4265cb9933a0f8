"""Where two greedy answers part, and how near a tie the target was there.

Rounding can only tell a near tie otherwise. So the text up to the difference is given to a target
in FP32, which says by how much it prefers the one token to the other; and to the same target in
the precision that was run, whose log-probabilities are off by so much there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from knockon.bench.loaded import answer
from knockon.bench.partings import first_partings
from knockon.engine.engine import Engine
from knockon.engine.request import RequestOutput, TokenLogprobs
from knockon.engine.sampling_params import SamplingParams

_TOP = 20


@dataclass(frozen=True)
class Parting:
    """One first difference.

    Attributes:
        answer, at: which answer, which token of it; ``at`` is the shorter one's length where one
            only goes on longer.
        ours, theirs: the two tokens; ``None`` past an answer's end.
        margin: between the two in log-probability, by the target in FP32: positive where it
            prefers ``theirs``. ``inf`` where one is not among its best.
        rounding: by how much the same margin is another in the precision that was run.
    """

    answer: int
    at: int
    ours: int | None
    theirs: int | None
    margin: float
    rounding: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding of the size seen there explains the difference.

        Two roundings come into it: the same tokens, computed in batches of another shape, are
        rounded otherwise each time. So up to twice what one was seen to be.
        """
        return abs(self.margin) <= 2 * max(self.rounding, _LEAST_ROUNDING)


# One rounding of a BF16 logit between 16 and 32: what an equal margin may have been moved by.
_LEAST_ROUNDING = 0.125


def first_differences(
    ours: Sequence[RequestOutput], theirs: Sequence[RequestOutput]
) -> list[tuple[int, int]]:
    """Answers that are not the same, and the first token where they are not."""
    return first_partings([a.token_ids for a in ours], [b.token_ids for b in theirs])


def part(
    ours: Sequence[RequestOutput],
    theirs: Sequence[RequestOutput],
    exact: Engine,
    rounded: Engine,
    concurrency: int = 8,
) -> list[Parting]:
    """Explain every first difference.

    Args:
        exact: the target alone in FP32.
        rounded: the target alone in the precision that was run.
    """
    places = first_differences(ours, theirs)
    if not places:
        return []
    prefixes = [
        theirs[number].prompt_token_ids + theirs[number].token_ids[:at] for number, at in places
    ]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=_TOP)
    read = [answer(engine, prefixes, params, concurrency)[0] for engine in (exact, rounded)]
    partings = []
    for i, (number, at) in enumerate(places):
        a, b = _token(ours[number], at), _token(theirs[number], at)
        margins = [_margin(outputs[i], a, b) for outputs in read]
        partings.append(Parting(number, at, a, b, margins[0], abs(margins[0] - margins[1])))
    return partings


def _token(output: RequestOutput, at: int) -> int | None:
    return output.token_ids[at] if at < len(output.token_ids) else None


def _margin(read: RequestOutput, ours: int | None, theirs: int | None) -> float:
    assert read.logprobs is not None
    place: TokenLogprobs = read.logprobs[0]
    known = place.top | {place.token_id: place.logprob}
    if ours not in known or theirs not in known:
        return math.inf
    return known[theirs] - known[ours]
