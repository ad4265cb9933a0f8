"""A rollout with other settings is one made with them, and shares what is large."""

from __future__ import annotations

import pytest

from knockon.errors import Refused
from knockon.parallel import SingleRank, VocabShard
from tests.rollout.exact_cases import exact_case
from tests.rollout.thread_ranks import ThreadGroup, run_ranks

V = 45
STAGES = ((0, "full"), (9, "full"), (9, "compact"), (V + 1, "auto"))


@pytest.mark.parametrize("size", (1, 3))
def test_every_stage_from_one_rollout_is_that_stage_made_anew(size: int) -> None:
    case = exact_case(2, V, batch=3, steps=6)

    def program(group: ThreadGroup) -> list[list[list[int]]]:
        shard = VocabShard.deal(V, size, group.rank)
        made = case.rollout(shard, group, sharded_embedding=size > 1, pool_size=40)
        group.calls.clear()
        others = [made.with_settings(*stage) for stage in STAGES]
        assert not group.calls
        return [case.propose(other) for other in others]

    wanted = [case.oracle(pool_size) for pool_size, _ in STAGES]
    assert run_ranks(size, program) == [wanted] * size


def test_the_gate_table_is_shared_and_the_first_rollout_unchanged() -> None:
    case = exact_case(3, V, batch=2, steps=5)
    first = case.rollout(VocabShard.deal(V, 1, 0), SingleRank(), pool_size=9, exchange="compact")
    before = case.propose(first)
    other = first.with_settings(0)
    case.propose(other)
    assert other._gates is first._gates and other._recurrence is first._recurrence
    assert other.nan_rows is not first.nan_rows
    assert (first.pool_size, first.exchange, first.exchange_taken) == (9, "compact", "compact")
    assert (other.pool_size, other.exchange, other.exchange_taken) == (0, "compact", "full")
    assert case.propose(first) == before


def test_what_is_not_given_stays() -> None:
    case = exact_case(5, V, batch=1, steps=2)
    shard = VocabShard.deal(V, 1, 0)
    made = case.rollout(
        shard, SingleRank(), pool_size=9, exchange="compact", implementation="plain"
    )
    other = made.with_settings(pool_size=11)
    assert (other.pool_size, other.exchange, other.implementation) == (11, "compact", "plain")
    assert other.with_settings().why_plain == ""  # plain was asked for
    assert "GPU" in made.with_settings(implementation="auto").why_plain


def test_ranks_that_want_different_implementations_are_refused_everywhere() -> None:
    case = exact_case(6, V, batch=1, steps=2)

    def program(group: ThreadGroup) -> str:
        shard = VocabShard.deal(V, 2, group.rank)
        implementation = "plain" if group.rank == 0 else "magic"
        with pytest.raises(Refused) as refused:
            case.rollout(shard, group, pool_size=9, implementation=implementation)
        return str(refused.value)

    first, second = run_ranks(2, program)
    assert "rank 1" in first
    assert "magic" in second


def test_only_an_fp8_head_takes_an_lm_heads_place() -> None:
    case = exact_case(4, V, batch=1, steps=2)
    made = case.rollout(VocabShard.deal(V, 1, 0), SingleRank())
    with pytest.raises(Refused, match="lm_head: found 'Tensor', wanted an FP8Head"):
        made.with_settings(lm_head=case.draft_hidden)
    with pytest.raises(Refused, match="implementation"):
        made.with_settings(implementation="")


@pytest.mark.parametrize(("pool_size", "exchange"), ((-1, "auto"), (9, "sparse")))
def test_settings_are_held_to_the_same_rules(pool_size: int, exchange: str) -> None:
    case = exact_case(4, V, batch=1, steps=2)
    made = case.rollout(VocabShard.deal(V, 1, 0), SingleRank())
    with pytest.raises(Refused, match=r"pool_size|exchange"):
        made.with_settings(pool_size, exchange)
