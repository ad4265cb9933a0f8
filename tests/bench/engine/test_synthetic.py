"""Synthetic accept lengths: the mean asked for, a function of seed and position alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from knockon.bench.engine.synthetic import (
    SyntheticAccept,
    acceptance_rate,
    choose_seeds,
    count_steps,
)
from knockon.engine.sampling import SamplingBatch, SamplingRequest
from knockon.engine.sampling_params import SamplingParams
from knockon.engine.verify import Accepted
from knockon.errors import Refused

VOCAB = 1000


def batch_of(seeds: list[int]) -> SamplingBatch:
    greedy = SamplingParams(temperature=0.0)
    return SamplingBatch.build([SamplingRequest(greedy, seed) for seed in seeds], VOCAB)


def run(accept: SyntheticAccept, seeds: list[int], starts: Tensor, width: int) -> Accepted:
    rng = torch.Generator().manual_seed(1)
    proposals = torch.randint(VOCAB, (len(seeds), width - 1), generator=rng)
    drawn = torch.randint(VOCAB, (len(seeds), width), generator=rng)
    positions = starts[:, None] + torch.arange(width)
    return accept(proposals, drawn, positions, batch_of(seeds))


@pytest.mark.parametrize("width", (2, 8, 16))
@pytest.mark.parametrize("share", (0.0, 0.3, 0.6, 0.95, 1.0))
def test_the_rate_gives_the_mean_exactly(width, share):
    mean = 1 + share * (width - 1)
    rate = acceptance_rate(mean, width)
    assert sum(rate**i for i in range(width)) == pytest.approx(mean, abs=1e-9)


@pytest.mark.parametrize("mean", (0.9, 16.1, float("nan")))
def test_a_mean_that_the_width_cannot_give_is_refused(mean):
    with pytest.raises(Refused, match="1 to the verify width 16"):
        SyntheticAccept(mean, 16)


@pytest.mark.parametrize("mean", (1.0, 2.5, 6.878, 9.163, 16.0))
def test_accept_lengths_have_the_mean_asked_for(mean):
    accept = SyntheticAccept(mean, 16)
    count = 20_000
    starts = torch.arange(count) % 700
    lengths = run(accept, list(range(count)), starts, 16).lengths.double()
    error = float(lengths.std()) / count**0.5
    assert abs(float(lengths.mean()) - mean) <= 4 * error + 1e-12
    assert lengths.min() >= 1 and lengths.max() <= 16


def test_accept_lengths_follow_the_geometric_law():
    accept = SyntheticAccept(4.0, 8)
    count = 20_000
    found = run(accept, list(range(count)), torch.full((count,), 100), 8).lengths
    for length in range(1, 8):
        share = float((found > length).double().mean())
        assert share == pytest.approx(accept.rate**length, abs=0.015)


def test_two_means_make_two_rates():
    accept = SyntheticAccept(9.163, 16, (8, 6.335))
    assert accept.mean_at(8) == pytest.approx(6.335) and accept.mean_at(16) == pytest.approx(9.163)
    assert accept.rate != accept.rate_beyond
    count = 20_000
    starts = torch.arange(count) % 700
    for width, mean in ((8, 6.335), (16, 9.163)):
        lengths = run(accept, list(range(count)), starts, width).lengths.double()
        assert float(lengths.mean()) == pytest.approx(mean, rel=0.015)
    for mean in (6.0, 14.9):
        with pytest.raises(Refused, match="by the mean at verify width 8"):
            SyntheticAccept(mean, 16, (8, 6.335))


def test_a_request_accepts_the_same_in_any_batch_and_at_any_width():
    accept = SyntheticAccept(6.0, 16)
    seeds, starts = [5, -(2**63), 2**63 - 1, 77], torch.tensor([3, 400, 9, 12])
    whole = run(accept, seeds, starts, 16).lengths
    assert torch.equal(whole, run(accept, seeds, starts, 16).lengths)
    for row, seed in enumerate(seeds):
        assert run(accept, [seed], starts[row : row + 1], 16).lengths == whole[row]
        narrow = run(accept, [seed], starts[row : row + 1], 4).lengths
        assert narrow == whole[row].clamp(max=4)


def test_tokens_are_the_proposals_then_the_targets_own_then_nothing():
    accept = SyntheticAccept(3.0, 6)
    proposals = torch.arange(10, 15).expand(50, 5).clone()
    proposals[:, 1] = -1  # a drafter that has nothing to propose
    drawn = torch.arange(20, 26).expand(50, 6)
    positions = torch.arange(50)[:, None] + torch.arange(6)
    found = accept(proposals, drawn, positions, batch_of(list(range(50))))
    assert len(found.lengths.unique()) > 2
    for tokens, length, bonus in zip(*found, strict=True):
        wanted = [*[10, 21, 12, 13, 14][: int(length) - 1], int(bonus)]
        assert bonus == 20 + length - 1
        assert tokens.tolist() == wanted + [-1] * (6 - len(wanted))


def test_without_proposals_the_drawn_token_is_the_bonus():
    found = run(SyntheticAccept(1.0, 1), [4, 5], torch.tensor([8, 9]), 1)
    assert found.lengths.tolist() == [1, 1] and torch.equal(found.tokens[:, 0], found.bonus)


@pytest.mark.parametrize(
    ("mean", "width", "narrow"),
    ((1.0, 1, None), (1.0, 4, None), (3.3, 8, None), (16.0, 16, None), (9.0, 16, (8, 6.5))),
)
def test_steps_are_counted_as_they_will_be_taken(mean, width, narrow):
    accept = SyntheticAccept(mean, width, narrow)
    seeds, start, tokens = [1, 2, 3], 11, 40
    taken = []
    for seed in seeds:
        gained, steps = 1, 0
        while gained < tokens:
            at = torch.tensor([start + gained - 1])
            gained += int(run(accept, [seed], at, width).lengths)
            steps += 1
        taken.append(steps)
    assert count_steps(accept, torch.tensor(seeds), start, tokens).tolist() == taken


def test_seeds_are_chosen_to_come_near_the_mean_even_of_few_requests():
    accept = SyntheticAccept(6.878, 16)
    seeds = choose_seeds(accept, 2, 256, 512, seed=0)
    steps = count_steps(accept, torch.tensor(seeds), 256, 512)
    assert 2 * 511 / int(steps.sum()) == pytest.approx(6.878, rel=0.01)
    assert seeds == choose_seeds(accept, 2, 256, 512, seed=0)
    assert seeds != choose_seeds(accept, 2, 256, 512, seed=1)
