"""On a GPU every stage is the oracle's chain, token for token: exact arithmetic, hard logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from knockon.parallel import SingleRank, VocabShard
from knockon.rollout import domino
from tests.rollout.exact_cases import DTYPES, ExactCase, cut_shards, exact_case
from tests.rollout.thread_ranks import ThreadGroup, run_ranks

pytestmark = pytest.mark.gpu


def on_gpu(case: ExactCase) -> ExactCase:
    weights = ("gru_input", "gru_state", "correction_in", "correction_out")
    head = replace(case.head, **{name: getattr(case.head, name).cuda() for name in weights})
    moved = ("embedding", "base", "draft_hidden", "bonus")
    return replace(case, head=head, **{name: getattr(case, name).cuda() for name in moved})


@pytest.fixture(params=(False, True), ids=("small", "as if large"))
def as_if_large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether blocks take the way of large ones: pool rows in parts."""
    if request.param:
        monkeypatch.setattr(
            domino, "reads_in_parts", lambda values, dtype, cuda: dtype == torch.bfloat16
        )
    return request.param


@pytest.mark.parametrize("implementation", ("plain", "auto"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("specials", (False, True))
def test_stages_on_a_gpu_are_the_oracle(
    dtype: torch.dtype, specials: bool, implementation: str, as_if_large
) -> None:
    if implementation == "auto" and as_if_large:
        pytest.skip("a way of the plain implementation")
    for seed in range(12):
        vocab_size, prefix = 20 + 3 * seed, seed % 4
        case = exact_case(
            seed,
            vocab_size,
            batch=1 + seed % 6,
            steps=1 + seed % 7,
            prefix_len=prefix,
            shift_label=bool(seed % 2),
            dtype=dtype,
            specials=specials,
        )
        there = on_gpu(case)
        for pool_size in (0, 1, 7, 19):
            wanted = case.oracle(pool_size)
            for shards in ([VocabShard.deal(vocab_size, 1, 0)], cut_shards(vocab_size, [], 3)):
                for exchange in ("full", "compact"):
                    rollout = there.rollout(
                        shards[0],
                        SingleRank(),
                        pool_size=pool_size,
                        exchange=exchange,
                        implementation=implementation,
                    )
                    fused = implementation == "auto" and pool_size and dtype != torch.float64
                    assert rollout.implementation == ("fused" if fused else "plain")
                    assert there.propose(rollout) == wanted, (seed, pool_size, exchange)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("exchange", ("full", "compact"))
@pytest.mark.parametrize("implementation", ("plain", "auto"))
def test_ranks_on_a_gpu_are_the_oracle(
    dtype: torch.dtype, exchange: str, implementation: str
) -> None:
    for seed in range(4):
        case = exact_case(100 + seed, 40, batch=5, steps=6, dtype=dtype, specials=bool(seed % 2))
        there, shards = on_gpu(case), cut_shards(40, [300, 300 + 100 * seed], seed)

        def program(
            group: ThreadGroup, there: ExactCase = there, shards: list[VocabShard] = shards
        ) -> list[list[int]]:
            rollout = there.rollout(
                shards[group.rank],
                group,
                pool_size=9,
                exchange=exchange,
                shards=shards,
                implementation=implementation,
            )
            return there.propose(rollout)

        assert run_ranks(3, program) == [case.oracle(9)] * 3


def test_the_fused_cell_is_the_plain_one() -> None:
    case = exact_case(0, 12, batch=2, steps=2, dtype=torch.float32)
    recurrence = domino.Recurrence(case.head)
    rng = torch.Generator().manual_seed(0)
    width = recurrence.width
    state, inputs, both = (
        torch.randn(5, n * width + extra, generator=rng) for n, extra in ((1, 0), (3, 0), (3, 4))
    )
    gates = both[:, : 3 * width]  # a view, as the chain passes it
    plain = recurrence.cell(state, inputs, gates)
    fused = recurrence.cell(state.cuda(), inputs.cuda(), both.cuda()[:, : 3 * width])
    torch.testing.assert_close(fused.cpu(), plain, rtol=1e-6, atol=1e-6)
