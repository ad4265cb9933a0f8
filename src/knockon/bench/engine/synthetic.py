"""Accept lengths of a given mean, whatever was proposed: random weights never agree by themselves.

All of a step's work is done, proposals and verification alike; only which proposals count as
accepted is decided by a coin that is a pure function of the request's seed and the proposal's
position. So it is the same for every drafter, in any batch and on any device, and each position
is tested once: accept lengths are independent draws of a geometric law cut off at the width, or of
two laws, one up to a narrower width of which the mean is known too and one beyond.
"""

from __future__ import annotations

import random
from functools import lru_cache

import torch
from torch import Tensor

from knockon.engine.noise import position_words
from knockon.engine.sampling import SamplingBatch
from knockon.engine.verify import Accepted
from knockon.errors import Refused

_CANDIDATES = 64  # sets of seeds that the best is taken from
_AT_A_TIME = 256  # requests whose every window of positions is in memory


class SyntheticAccept:
    """Stands in for :func:`knockon.engine.speculate.accept_drawn`.

    No host read and no shape that depends on data, as a CUDA graph needs it. It takes about ten
    small kernels more than the real thing.

    Args:
        mean: accept length wanted at ``width``, bonus included, 1 to ``width``.
        width: the widest that is verified; a narrower step cuts the same law off earlier.
        narrow: a narrower width and the mean there, if that is another than the cut gives.

    Attributes:
        rate: probability that a proposal is accepted if all before it were.
        rate_beyond: the same of proposals that the narrower width does not verify.

    Raises:
        Refused: a mean that the width cannot give.
    """

    def __init__(self, mean: float, width: int, narrow: tuple[int, float] | None = None) -> None:
        self.mean = mean
        self.width = width
        if narrow is None:
            self._near = width - 1
            self.rate = self.rate_beyond = acceptance_rate(mean, width)
        else:
            self._near = narrow[0] - 1
            self.rate = acceptance_rate(narrow[1], narrow[0])
            self.rate_beyond = _rate_beyond(mean, width, self.rate, self._near)
        self._below, self._below_beyond = map(_threshold, (self.rate, self.rate_beyond))

    def mean_at(self, width: int) -> float:
        """Mean accept length where ``width`` positions are verified: ``1 + p + … + p^(w-1)``."""
        return sum(_survivals(self.rate, self.rate_beyond, self._near, width))

    def passes(self, words: Tensor) -> Tensor:
        """Whether a block's proposals are accepted if all before them are; bool.

        Args:
            words: ``[..., w-1]`` of the proposals' positions, the block's first one first.
        """
        near = words < self._below
        if self.rate == self.rate_beyond:
            return near
        place = torch.arange(words.shape[-1], device=words.device)
        return torch.where(place < self._near, near, words < self._below_beyond)

    def __call__(
        self, proposals: Tensor, drawn: Tensor, positions: Tensor, sampling: SamplingBatch
    ) -> Accepted:
        """What a step accepts.

        Args:
            proposals: int64 ``[B, w-1]``.
            drawn: int64 ``[B, w]``, of which the bonus is taken.
            positions: int64 ``[B, w]``, of the verified rows: proposal ``i`` stands at ``i + 1``.
            sampling: whose seeds are used.
        """
        passed = self.passes(position_words(sampling.seed[:, None], positions[:, 1:]))
        accepted = passed.long().cumprod(1).sum(1)
        row = torch.arange(drawn.shape[1], device=drawn.device)
        # What was accepted is what KV was written for; the bonus is the target's own.
        block = torch.cat([torch.where(proposals < 0, drawn[:, :-1], proposals), drawn[:, -1:]], 1)
        tokens = torch.where(row < accepted[:, None], block, drawn)
        tokens = tokens.masked_fill(row > accepted[:, None], -1)
        return Accepted(tokens, accepted + 1, drawn.gather(1, accepted[:, None])[:, 0])


def acceptance_rate(mean: float, width: int) -> float:
    """The ``p`` with ``1 + p + … + p^(w-1) = mean``, by bisection.

    Raises:
        Refused: a mean outside 1 to ``w``.
    """
    if not 1 <= mean <= width:
        raise Refused("accept_length", mean, f"1 to the verify width {width}")
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        if sum(middle**i for i in range(width)) < mean:
            low = middle
        else:
            high = middle
    return high


def _rate_beyond(mean: float, width: int, rate: float, near: int) -> float:
    """The rate past the first ``near`` proposals that makes ``mean`` of it all, by bisection."""
    lowest, highest = (sum(_survivals(rate, beyond, near, width)) for beyond in (0.0, 1.0))
    if not lowest <= mean <= highest:
        wanted = f"{lowest:.4g} to {highest:.4g}, by the mean at verify width {near + 1}"
        raise Refused("accept_length", mean, wanted)
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        if sum(_survivals(rate, middle, near, width)) < mean:
            low = middle
        else:
            high = middle
    return high


def _survivals(rate: float, beyond: float, near: int, width: int) -> list[float]:
    """Probability that ``0 … width - 1`` proposals are accepted or more."""
    return [rate ** min(i, near) * beyond ** max(0, i - near) for i in range(width)]


def _threshold(rate: float) -> int:
    """The signed word below which so many of all are."""
    return min(int(rate * 2**64), 2**64 - 1) - 2**63


def count_steps(accept: SyntheticAccept, seeds: Tensor, start: int, tokens: int) -> Tensor:
    """Verifications that each request will take, known without running one.

    Args:
        seeds: int64 ``[N]``.
        start: the prompt's length, where the first bonus token stands.
        tokens: output tokens wanted, at least 2; the prompt's prefill gives the first.

    Returns:
        int64 ``[N]``.
    """
    end = start + tokens
    tested = torch.arange(start + 1, end + accept.width, device=seeds.device)
    words = position_words(seeds[:, None], tested)
    # By where the bonus stands: as far as the next proposal that does not pass, or the width.
    lengths = torch.ones((len(seeds), tokens), dtype=torch.int64, device=seeds.device)
    if accept.width > 1:
        for some, found in zip(words.split(_AT_A_TIME), lengths.split(_AT_A_TIME), strict=True):
            passed = accept.passes(some.unfold(1, accept.width - 1, 1)[:, :tokens])
            found += passed.byte().cumprod(2, dtype=torch.uint8).sum(2)
    gained = torch.ones_like(seeds)
    steps = torch.zeros_like(seeds)
    while bool((going := gained < tokens).any()):
        length = lengths.gather(1, (gained - 1).clamp(max=tokens - 2)[:, None])[:, 0]
        gained += length * going
        steps += going
    return steps


@lru_cache(maxsize=64)
def choose_seeds(
    accept: SyntheticAccept, count: int, start: int, tokens: int, seed: int
) -> tuple[int, ...]:
    """Seeds whose requests together come nearest the mean asked for.

    A run of few requests would else miss it by several percent, by chance. Requests differ among
    each other as chance has it.

    Args:
        count: requests.
        start, tokens: as :func:`count_steps`.
        seed: fixes the choice.
    """
    rng = random.Random(f"{seed} accept lengths")
    sets = [[rng.randrange(-(2**63), 2**63) for _ in range(count)] for _ in range(_CANDIDATES)]
    steps = count_steps(accept, torch.tensor(sets).flatten(), start, tokens)
    taken = steps.view(_CANDIDATES, count).sum(1).tolist()
    gained = count * (tokens - 1)
    best = min(range(_CANDIDATES), key=lambda i: abs(gained / max(taken[i], 1) - accept.mean))
    return tuple(sets[best])
