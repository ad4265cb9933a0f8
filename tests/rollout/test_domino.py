"""Stages A, B and C, on any number of ranks, are the oracle's chain, token for token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knockon.errors import Refused
from knockon.parallel import SingleRank, VocabShard
from knockon.rollout import DominoHead, DominoRollout
from knockon.rollout.reference import reference_rollout
from tests.rollout.exact_cases import DTYPES, ExactCase, cut_shards, drawn_case, exact_case
from tests.rollout.thread_ranks import ThreadGroup, run_ranks


def chains_of_all_ranks(
    case: ExactCase, shards: list[VocabShard], **options: object
) -> list[list[list[int]]]:
    def program(group: ThreadGroup) -> list[list[int]]:
        return case.propose(case.rollout(shards[group.rank], group, **options))

    return run_ranks(len(shards), program)


@settings(max_examples=300)
@given(data=st.data())
def test_every_stage_on_every_rank_is_the_oracle(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from((1, 2, 3, 4, 8)), "ranks")
    vocab_size = data.draw(st.integers(1, 48), "V")
    case = drawn_case(data, vocab_size)
    pool_size = data.draw(st.integers(0, vocab_size + 2), "K")
    cuts = data.draw(st.lists(st.integers(0, 1000), min_size=size - 1, max_size=size - 1), "cuts")
    shards = data.draw(
        st.sampled_from(
            [
                [VocabShard.deal(vocab_size, size, r) for r in range(size)],
                cut_shards(vocab_size, cuts, extra_padding=data.draw(st.integers(0, 3), "pad")),
            ]
        ),
        "shards",
    )
    sharded = data.draw(st.booleans(), "sharded embedding")
    wanted = case.oracle(pool_size)
    for exchange in ("full", "compact"):
        chains = chains_of_all_ranks(
            case, shards, pool_size=pool_size, exchange=exchange, sharded_embedding=sharded
        )
        assert chains == [wanted] * size, exchange


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cutoff_of_nothing_but_ties_keeps_the_lowest_ids(dtype: torch.dtype) -> None:
    case = exact_case(5, 40, batch=2, steps=4, dtype=dtype)
    tied = ExactCase(
        case.head, case.embedding, torch.ones_like(case.base), case.draft_hidden, case.bonus, 4
    )
    shards = [VocabShard.deal(40, 4, r) for r in range(4)]
    for exchange in ("full", "compact"):
        chains = chains_of_all_ranks(tied, shards, pool_size=13, exchange=exchange)
        assert chains == [tied.oracle(13)] * 4
        assert all(token < 13 for chain in chains[0] for token in chain)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pool_deeper_than_the_numbers_takes_nan_ids_and_never_padding(dtype: torch.dtype) -> None:
    case = exact_case(8, 12, batch=2, steps=4, dtype=dtype)
    case.base[..., :9] = float("nan")
    case.base[..., 9] = -float("inf")
    shards = cut_shards(12, [250, 250], extra_padding=4)  # 3 ids, none, 9 ids
    for pool_size in (1, 3, 4, 7, 11):
        for exchange in ("full", "compact"):
            chains = chains_of_all_ranks(case, shards, pool_size=pool_size, exchange=exchange)
            assert chains == [case.oracle(pool_size)] * 3
    only_nan = ExactCase(
        case.head,
        case.embedding,
        torch.full_like(case.base, float("nan")),
        case.draft_hidden,
        case.bonus,
        case.steps,
    )
    chains = chains_of_all_ranks(only_nan, shards, pool_size=5, exchange="compact")
    assert chains == [only_nan.oracle(5)] * 3 == [[[0] * 4] * 2] * 3


def test_the_pool_depends_only_on_the_rows_that_are_proposed() -> None:
    whole = exact_case(11, 48, batch=2, steps=6, dtype=torch.float32)
    for steps in range(7):
        case = ExactCase(
            whole.head,
            whole.embedding,
            whole.base[:, :steps],
            whole.draft_hidden,  # rows beyond the steps are there, and not read
            whole.bonus,
            steps,
        )
        shard = VocabShard.deal(48, 1, 0)
        rollout = case.rollout(shard, SingleRank(), pool_size=5)
        assert case.propose(rollout) == case.oracle(5)


def test_only_needed_rows_pass_the_lm_head() -> None:
    case = exact_case(3, 20, batch=2, steps=5)
    seen = []

    def lm_head(x: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return torch.zeros(len(x), 20, dtype=x.dtype)

    shard = VocabShard.deal(20, 1, 0)
    rollout = DominoRollout(case.head, case.embedding, lm_head, shard, SingleRank(), 4)
    rollout(case.draft_hidden, case.bonus, 3)
    assert seen == [(3 * 2, 4)]


@pytest.mark.parametrize("shift_label", (False, True))
@pytest.mark.parametrize("pool_size", (0, 64))
@pytest.mark.parametrize("gate_table", (False, True))
def test_random_weights_in_fp64_give_the_oracles_chain(
    shift_label: bool, pool_size: int, gate_table: bool
) -> None:
    rng = torch.Generator().manual_seed(pool_size + 2 * shift_label + gate_table)
    vocab_size, hidden, width, narrow, length = 301, 24, 12, 8, 8

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    head = DominoHead(
        normal(3 * width, hidden) * 0.4,
        normal(3 * width, width),
        normal(narrow, hidden + width),
        normal(vocab_size, narrow),
        shift_label=shift_label,
    )
    embedding, lm_head = normal(vocab_size, hidden), normal(vocab_size, hidden)
    draft_hidden = normal(6, length, hidden)
    bonus = torch.randint(0, vocab_size, (6,), generator=rng)
    wanted = reference_rollout(head, embedding, lm_head, draft_hidden, bonus, length - 1, pool_size)

    def program(group: ThreadGroup) -> torch.Tensor:
        shard = VocabShard.deal(vocab_size, group.size, group.rank)
        local = lm_head.new_zeros(shard.num_padded, hidden)
        local[: shard.num_org] = lm_head[shard.start : shard.stop]
        rollout = DominoRollout(
            head, embedding, local, shard, group, pool_size, gate_table=gate_table
        )
        return rollout(draft_hidden, bonus)

    for size in (1, 3):
        for chain in run_ranks(size, program):
            assert torch.equal(chain, wanted)


def test_computed_gates_are_the_oracles_without_rounding() -> None:
    case = exact_case(9, 30, batch=3, steps=5)
    shard = VocabShard.deal(30, 1, 0)
    rollout = case.rollout(shard, SingleRank(), pool_size=7, gate_table=False)
    assert rollout.gate_table_bytes == 0
    assert case.propose(rollout) == case.oracle(7, gate_table=False)


def test_rows_with_nan_are_counted_and_padding_is_not() -> None:
    case = exact_case(2, 10, batch=2, steps=4)
    case.base[0, 1, 3] = float("nan")
    case.base[0, 1, 4] = float("nan")
    case.base[1, 3, 9] = float("nan")
    shard = VocabShard(0, 1, 10, 0, 10, 16)
    head = case.lm_head(shard)

    def nan_in_padding(x: torch.Tensor) -> torch.Tensor:
        logits = head(x)
        logits[:, 10:] = float("nan")
        return logits

    rollout = DominoRollout(case.head, case.embedding, nan_in_padding, shard, SingleRank(), 4)
    chains = case.propose(rollout)
    assert chains == case.oracle(4)
    assert rollout.nan_rows.item() == 2
    case.propose(rollout)
    assert rollout.nan_rows.item() == 4


def test_no_steps_and_no_requests_give_empty_proposals() -> None:
    shard = VocabShard.deal(12, 1, 0)
    for batch, steps in ((0, 3), (2, 0), (0, 0)):
        case = exact_case(1, 12, batch=batch, steps=steps)
        out = case.rollout(shard, SingleRank())(case.draft_hidden, case.bonus, steps)
        assert out.shape == (batch, steps)
        assert out.dtype == torch.int64


def test_steps_default_to_the_block_less_one() -> None:
    case = exact_case(1, 12, batch=2, steps=5)
    rollout = case.rollout(VocabShard.deal(12, 1, 0), SingleRank())
    assert torch.equal(rollout(case.draft_hidden, case.bonus), torch.tensor(case.oracle(2048)))


def test_a_block_that_does_not_fit_is_refused() -> None:
    case = exact_case(1, 12, batch=2, steps=5)
    rollout = case.rollout(VocabShard.deal(12, 1, 0), SingleRank())
    for hidden, bonus, steps in (
        (case.draft_hidden, case.bonus, 6),
        (case.draft_hidden, case.bonus, -1),
        (case.draft_hidden, case.bonus[:1], 5),
        (case.draft_hidden[..., :3], case.bonus, 5),
        (case.draft_hidden[0], case.bonus, 5),
    ):
        with pytest.raises(Refused):
            rollout(hidden, bonus, steps)
