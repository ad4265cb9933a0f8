"""Under speculation the tokens are the target's own: equal when seeded, in law when not.

The target is a Markov chain of order one with penalties and filters on top, the drafters are
arbitrary. Each broken rule below is caught by the same check that the right one passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from knockon.engine.sampling import SamplingBatch, SamplingRequest, sample
from knockon.engine.sampling_params import SamplingParams
from knockon.engine.verify import Accepted, accept

V = 8
CHAIN = torch.randn(V, V, generator=torch.Generator().manual_seed(11)) * 1.2
Drafter = Callable[[list[int], int], list[int]]
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, SamplingBatch], Accepted]

PROMPT = [2, 5, 1]


def best_drafter(tokens: list[int], steps: int) -> list[int]:
    out = tokens[-1:]
    for _ in range(steps):
        out.append(int(CHAIN[out[-1]].argmax()))
    return out[1:]


def bad_drafter(tokens: list[int], steps: int) -> list[int]:
    return [int(CHAIN[tokens[-1]].argmin())] * steps


def random_drafter(tokens: list[int], steps: int) -> list[int]:
    g = torch.Generator().manual_seed(len(tokens))
    return torch.randint(0, V, (steps,), generator=g).tolist()


def absent_drafter(tokens: list[int], steps: int) -> list[int]:
    return [-1] * steps


def generate(
    params: SamplingParams, seed: int, count: int, width: int, drafter: Drafter
) -> tuple[list[int], list[int]]:
    """Tokens and accept lengths of one request; ``width`` 1 is the target alone."""
    prompt = torch.tensor([PROMPT])
    request = SamplingRequest(params, seed, PROMPT, [], [[3, 4], [6]])
    batch = SamplingBatch.build([request], V)
    none = torch.empty(1, 0, dtype=torch.int64)
    first = sample(CHAIN[prompt[:, -1:]], none, torch.tensor([[len(PROMPT)]]), batch)
    batch.record(first, torch.tensor([1]))
    output, lengths = [int(first)], []
    while len(output) < count:
        proposals = torch.tensor([drafter(PROMPT + output, width - 1)]).view(1, width - 1)
        inputs = [output[-1], *proposals[0].clamp(min=0).tolist()]
        bonus_position = len(PROMPT) + len(output) - 1
        positions = torch.arange(1, width + 1)[None] + bonus_position
        result = accept(proposals, sample(CHAIN[inputs][None], proposals, positions, batch))
        batch.record(result.tokens, result.lengths)
        output += result.tokens[0, : int(result.lengths)].tolist()
        lengths.append(int(result.lengths))
    return output[:count], lengths


@pytest.mark.parametrize("drafter", [best_drafter, bad_drafter, random_drafter, absent_drafter])
@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"temperature": 0},
        {"temperature": 0.7, "top_k": 4},
        {"top_p": 0.8, "min_p": 0.05},
        {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
        {"temperature": 0, "frequency_penalty": 0.4},
    ],
)
def test_a_seeded_speculative_run_equals_the_target_alone(
    setting: dict[str, Any], drafter: Drafter
) -> None:
    params = SamplingParams(**setting)
    for seed in (0, 12345, -7):
        alone, _ = generate(params, seed, 60, 1, drafter)
        for width in (2, 5, 8):
            assert generate(params, seed, 60, width, drafter)[0] == alone


def test_a_good_drafter_is_accepted_and_a_bad_one_is_not() -> None:
    params = SamplingParams(temperature=0.3)
    good = generate(params, 1, 100, 5, best_drafter)[1]
    bad = generate(params, 1, 100, 5, bad_drafter)[1]
    assert np.mean(good) > 2.5 and np.mean(bad) == 1


# --- The law, over many requests at once -----------------------------------------------------

N, WIDTH = 20_000, 4
PROPOSALS = best_drafter([0], WIDTH - 1)
PLACES = ("first", "middle", "bonus")


def right(
    logits: torch.Tensor, proposals: torch.Tensor, positions: torch.Tensor, batch: SamplingBatch
) -> Accepted:
    return accept(proposals, sample(logits, proposals, positions, batch))


def one_noise_for_all_positions(
    logits: torch.Tensor, proposals: torch.Tensor, positions: torch.Tensor, batch: SamplingBatch
) -> Accepted:
    return accept(proposals, sample(logits, proposals, torch.ones_like(positions), batch))


def every_first_proposal_accepted(
    logits: torch.Tensor, proposals: torch.Tensor, positions: torch.Tensor, batch: SamplingBatch
) -> Accepted:
    drawn = sample(logits, proposals, positions, batch)
    drawn[:, 0] = proposals[:, 0]
    return accept(proposals, drawn)


def bonus_drawn_with_the_noise_before_it(
    logits: torch.Tensor, proposals: torch.Tensor, positions: torch.Tensor, batch: SamplingBatch
) -> Accepted:
    shifted = positions.clone()
    shifted[:, -1] -= 1
    return accept(proposals, sample(logits, proposals, shifted, batch))


def logits_of_the_row_before(
    logits: torch.Tensor, proposals: torch.Tensor, positions: torch.Tensor, batch: SamplingBatch
) -> Accepted:
    return accept(proposals, sample(logits[:, [0, 0, 1, 2]], proposals, positions, batch))


def law(rule: Rule, place: str) -> float:
    """The p-value of the first token, of a middle row, or of the bonus after full acceptance.

    A block follows token 0. The first token's law is the chain's row 0; the middle one's, among
    requests whose first proposal was accepted, row ``d_0``; the bonus's, among those with all
    proposals accepted, row ``d_2``.
    """
    requests = [SamplingRequest(SamplingParams(), seed) for seed in range(N)]
    proposals = torch.tensor(PROPOSALS).expand(N, -1)
    logits = CHAIN[[0, *PROPOSALS]].expand(N, -1, -1)
    positions = torch.arange(WIDTH).expand(N, -1) + 20
    result = rule(logits, proposals, positions, SamplingBatch.build(requests, V))
    tokens, given = {
        "first": (result.tokens[:, 0], 0),
        "middle": (result.tokens[result.lengths > 1, 1], PROPOSALS[0]),
        "bonus": (result.bonus[result.lengths == WIDTH], PROPOSALS[-1]),
    }[place]
    assert len(tokens) > 1000
    expected = CHAIN[given].double().softmax(0).numpy() * len(tokens)
    return float(stats.chisquare(np.bincount(tokens.numpy(), minlength=V), expected).pvalue)


@pytest.mark.parametrize("place", PLACES)
def test_first_middle_and_bonus_tokens_follow_the_targets_law(place: str) -> None:
    assert law(right, place) > 1e-3


@pytest.mark.parametrize(
    ("broken", "seen_in"),
    [
        (one_noise_for_all_positions, "middle"),
        (one_noise_for_all_positions, "bonus"),
        (every_first_proposal_accepted, "first"),
        (bonus_drawn_with_the_noise_before_it, "bonus"),
        (logits_of_the_row_before, "middle"),
    ],
)
def test_the_same_check_catches_a_wrong_rule(broken: Rule, seen_in: str) -> None:
    assert law(broken, seen_in) < 1e-12


def test_the_acceptance_rate_is_the_proposals_probability() -> None:
    requests = [SamplingRequest(SamplingParams(), seed) for seed in range(N)]
    logits = CHAIN[[0, 0]].expand(N, -1, -1)
    batch = SamplingBatch.build(requests, V)
    for d in range(V):
        proposals = torch.full((N, 1), d)
        positions = torch.arange(2).expand(N, -1) + 100 * d
        accepted = int((right(logits, proposals, positions, batch).lengths == 2).sum())
        assert stats.binomtest(accepted, N, float(CHAIN[0].softmax(0)[d])).pvalue > 1e-4


@pytest.mark.parametrize(
    "setting", [{"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}]
)
def test_filtered_draws_follow_the_renormalised_law(setting: dict[str, Any]) -> None:
    params = SamplingParams(**setting)
    requests = [SamplingRequest(params, seed) for seed in range(N)]
    none = torch.empty(N, 0, dtype=torch.int64)
    positions = torch.full((N, 1), 5)
    logits = CHAIN[3].expand(N, 1, -1)
    drawn = sample(logits, none, positions, SamplingBatch.build(requests, V))
    p = (CHAIN[3].double() / params.temperature).softmax(0)
    order = p.argsort(descending=True)
    keep = torch.ones(V, dtype=torch.bool)
    if params.top_k:
        keep[order[params.top_k :]] = False
    keep[order[(p[order].cumsum(0) - p[order]) >= params.top_p]] = False
    keep &= p >= params.min_p * p.max()
    observed = np.bincount(drawn[:, 0].numpy(), minlength=V)
    assert observed[~keep.numpy()].sum() == 0
    assert setting == {"temperature": 0.5} or keep.sum() < V
    kept = (p * keep / (p * keep).sum())[keep].numpy() * N
    assert stats.chisquare(observed[keep.numpy()], kept).pvalue > 1e-4
