"""Penalties, row by row of a block, against a slow reference that emits the proposals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from knockon.engine.penalties import Penalties
from knockon.engine.sampling import SamplingBatch, SamplingRequest, sample
from knockon.engine.sampling_params import SamplingParams

V = 13
CPU = torch.device("cpu")
Factors = tuple[float, float, float]


def reference(
    row: list[float], prompt: list[int], output: list[int], factors: Factors
) -> list[float]:
    repetition, presence, frequency = factors
    result = list(row)
    for v in set(prompt) | set(output):
        result[v] = result[v] / repetition if result[v] > 0 else result[v] * repetition
    for v in set(output):
        result[v] -= frequency * output.count(v) + presence
    return result


IDS = st.lists(st.integers(0, V - 1), max_size=8)
FACTORS = st.tuples(
    st.sampled_from([0.5, 1.0, 1.3]),
    st.sampled_from([-1.0, 0.0, 0.7]),
    st.sampled_from([-0.5, 0.0, 0.4]),
)


@given(
    st.lists(st.tuples(IDS, IDS, FACTORS), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 10**6),
)
def test_row_i_counts_the_proposals_before_it_as_emitted(
    requests: list[tuple[list[int], list[int], Factors]], width: int, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    prompts, outputs, factors = (list(column) for column in zip(*requests, strict=True))
    penalties = Penalties.build(list(range(len(requests))), prompts, outputs, factors, V, CPU)
    # Twice, with what was kept of the first block recorded in between.
    for _ in range(2):
        logits = torch.randn(len(requests), width, V, generator=g) * 3
        proposals = torch.randint(0, V, (len(requests), width - 1), generator=g)
        expected = [
            [
                reference(
                    logits[b, i].tolist(),
                    prompts[b],
                    outputs[b] + proposals[b, :i].tolist(),
                    factors[b],
                )
                for i in range(width)
            ]
            for b in range(len(requests))
        ]
        penalties.apply_(logits, proposals)
        torch.testing.assert_close(logits, torch.tensor(expected))
        kept = torch.randint(1, width + 1, (len(requests),), generator=g)
        emitted = torch.randint(0, V, (len(requests), width), generator=g)
        penalties.record(emitted, kept)
        outputs = [out + emitted[b, : kept[b]].tolist() for b, out in enumerate(outputs)]


def test_a_penalty_on_the_second_request_touches_the_second_only() -> None:
    penalties = Penalties.build([1], [[1]], [[2, 2]], [(2.0, 0.5, 0.25)], V, CPU)
    logits = torch.ones(3, 2, V)
    penalties.apply_(logits, torch.tensor([[2], [3], [2]]))
    assert (logits[0] == 1).all() and (logits[2] == 1).all()
    expected = torch.ones(2, V)
    expected[:, 1] = 0.5
    expected[:, 2] = 0.5 - 0.5 - 0.5
    expected[1, 3] = 0.5 - 0.25 - 0.5
    assert torch.equal(logits[1], expected)


def test_negative_proposals_count_nothing() -> None:
    penalties = Penalties.build([0], [[]], [[]], [(1.0, 1.0, 1.0)], V, CPU)
    logits = torch.zeros(1, 2, V)
    penalties.apply_(logits, torch.tensor([[-1]]))
    assert (logits == 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1e-4])
def test_greedy_takes_the_argmax_of_penalised_logits(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, presence_penalty=1.0)
    batch = SamplingBatch.build(
        [
            SamplingRequest(SamplingParams(temperature=0), 0, [], [0]),
            SamplingRequest(params, 0, [], [0]),
        ],
        3,
    )
    logits = torch.tensor([[[2.0, 1.5, 1.2]] * 3] * 2)
    positions = torch.arange(3).expand(2, 3)
    drawn = sample(logits, torch.tensor([[1, 2]] * 2), positions, batch)
    # Second request: 0 is out from the start, 1 from row 1 on; at row 2 all three are.
    assert drawn.tolist() == [[0, 0, 0], [1, 2, 0]]
    assert (logits[1] == torch.tensor([2.0, 1.5, 1.2])).all()  # the caller's logits are untouched
