"""How often each position of a block is accepted, from counts that narrow widths censor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

# Evidence is forgotten over this many verifications, or this many steps if that is longer: at
# concurrency 1 few steps would hold too few verifications to tell two widths apart.
HORIZON_VERIFICATIONS = 512
HORIZON_STEPS = 64
# A position that a step did not look at ages more slowly: only probes refresh it.
UNSEEN_AGEING = 0.25
PRIOR_RATE, PRIOR_WEIGHT = 0.8, 4.0
NEIGHBOUR_WEIGHT = 8.0


class AcceptanceByPosition:
    """Running estimate of ``P(position i accepted | positions before it accepted)``.

    Position ``i`` is the ``i``-th proposal of a block, counted from 1; a width ``w`` verifies the
    positions ``1 .. w - 1``. An accept length ``a`` (bonus included) says that positions
    ``1 .. a - 1`` were accepted and, if ``a < w``, that position ``a`` was not. Where ``a == w``
    nothing was rejected and nothing is known of position ``w``: the count is censored.

    Args:
        widest: the widest width ever verified, at least 1.
    """

    def __init__(self, widest: int) -> None:
        self._reached = [0.0] * (widest - 1)
        self._accepted = [0.0] * (widest - 1)

    def update(self, width: int, accept_lengths: Sequence[int]) -> None:
        """Count one step's verifications at one width; each accept length is 1 to ``width``."""
        if not accept_lengths:
            return
        forgotten = min(len(accept_lengths) / HORIZON_VERIFICATIONS, 1 / HORIZON_STEPS)
        for i in range(len(self._reached)):
            seen = i < width - 1
            keep = 1 - forgotten * (1 if seen else UNSEEN_AGEING)
            self._reached[i] *= keep
            self._accepted[i] *= keep
            if seen:
                self._reached[i] += sum(length > i for length in accept_lengths)
                self._accepted[i] += sum(length > i + 1 for length in accept_lengths)

    @property
    def evidence(self) -> list[float]:
        """Verifications, less what is forgotten, that reached each position."""
        return list(self._reached)

    def rates(self) -> list[float]:
        """The conditional rate of each position.

        Each is drawn towards the rate before it, and equals it where nothing was observed.
        """
        found: list[float] = []
        rate, weight = PRIOR_RATE, PRIOR_WEIGHT
        for reached, accepted in zip(self._reached, self._accepted, strict=True):
            rate = (accepted + weight * rate) / (reached + weight)
            weight = NEIGHBOUR_WEIGHT
            found.append(rate)
        return found

    def expected_tokens(self) -> list[float]:
        """Mean tokens of a verification, bonus included: element ``w - 1`` for width ``w``."""
        return expected_tokens(self.rates())


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """``E[w] = 1 + sum over i < w of r_1 ... r_i``, for ``w = 1 .. len(rates) + 1``."""
    return list(accumulate(accumulate(rates, mul), initial=1.0))
