"""What cannot be right is refused at construction, with the field, what was found and wanted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from knockon.errors import Refused
from knockon.parallel import SingleRank, VocabShard
from knockon.rollout import DominoHead, DominoRollout
from knockon.rollout.gates import choose_gate_table
from knockon.rollout.validation import holds_whole_embedding
from tests.rollout.exact_cases import E, ExactCase, G, H, exact_case
from tests.rollout.thread_ranks import ThreadGroup, run_ranks

V = 20


def parts(dtype: torch.dtype = torch.bfloat16) -> dict:
    head = exact_case(0, V, batch=1, steps=2, dtype=dtype).head
    return {
        "head": head,
        "embedding": torch.zeros(V, H, dtype=dtype),
        "lm_head": torch.zeros(V, H, dtype=dtype),
        "shard": VocabShard.deal(V, 1, 0),
        "group": SingleRank(),
        "pool_size": 4,
    }


@pytest.mark.parametrize(
    ("change", "field"),
    (
        ({"pool_size": -1}, "pool_size"),
        ({"exchange": "ring"}, "exchange"),
        ({"gate_table": "yes"}, "gate_table"),
        ({"gate_table": 0}, "gate_table"),
        ({"gate_table": 1}, "gate_table"),
        ({"embedding": None}, "embedding"),
        ({"lm_head": None}, "lm_head"),
        ({"embedding": torch.zeros(V, H + 1, dtype=torch.bfloat16)}, "embedding shape"),
        ({"embedding": torch.zeros(V - 1, H, dtype=torch.bfloat16)}, "embedding rows"),
        ({"embedding": torch.zeros(V, H, dtype=torch.float64)}, "embedding dtype"),
        ({"embedding": torch.zeros(V, H, dtype=torch.int8)}, "embedding dtype"),
        ({"lm_head": torch.zeros(V + 3, H, dtype=torch.bfloat16)}, "lm_head rows"),
        ({"lm_head": torch.zeros(V, H, 1, dtype=torch.bfloat16)}, "lm_head shape"),
        ({"lm_head": torch.zeros(V, H, dtype=torch.float64)}, "lm_head dtype"),
        ({"lm_head": "lm_head.weight"}, "lm_head"),
        ({"shard": VocabShard.deal(V, 2, 0)}, "shard (rank, size)"),
        ({"shard": VocabShard.deal(V + 1, 1, 0)}, "head.correction_out rows"),
        ({"shard": VocabShard(0, 1, V, 0, V - 1, V)}, "ids held by all shards together"),
    ),
)
def test_a_part_that_does_not_fit_is_refused_by_name(change: dict, field: str) -> None:
    DominoRollout(**parts())
    with pytest.raises(Refused) as refused:
        DominoRollout(**{**parts(), **change})
    assert refused.value.field == field


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "field"),
    (
        ({"gru_input": zeros(3 * G + 1, H)}, "head.gru_input"),
        ({"gru_state": zeros(3 * G, G + 1)}, "head.gru_state"),
        ({"gru_state": zeros(3 * G, G, dtype=torch.bfloat16)}, "head.gru_state"),
        ({"correction_in": zeros(E, H + G + 1)}, "head.correction_in"),
        ({"correction_in": zeros(E + 1, H + G)}, "head.correction_in"),
        ({"correction_out": zeros(V, E, 1)}, "head.correction_out"),
        ({"correction_out": zeros(0, E)}, "head.correction_out"),
        ({"prefix_len": -1}, "head.prefix_len"),
        ({"prefix_len": 1.0}, "head.prefix_len"),
        ({"prefix_len": True}, "head.prefix_len"),
        ({"shift_label": "false"}, "head.shift_label"),
        ({"shift_label": None}, "head.shift_label"),
        ({"gru_input": [[0.0]]}, "head.gru_input"),
    ),
)
def test_a_head_whose_shapes_disagree_is_refused(change: dict, field: str) -> None:
    fitting = {
        "gru_input": zeros(3 * G, H),
        "gru_state": zeros(3 * G, G),
        "correction_in": zeros(E, H + G),
        "correction_out": zeros(V, E),
    }
    DominoHead(**fitting)
    with pytest.raises(Refused) as refused:
        DominoHead(**{**fitting, **change})
    assert refused.value.field == field


def test_integer_heads_are_refused() -> None:
    with pytest.raises(Refused):
        DominoHead(
            *(
                zeros(*shape, dtype=torch.int64)
                for shape in ((3 * G, H), (3 * G, G), (E, H + G), (V, E))
            )
        )


def errors_of_ranks(make: Callable[[ThreadGroup, ExactCase], object], size: int = 3) -> list[str]:
    case = exact_case(0, V, batch=1, steps=2)

    def program(group: ThreadGroup) -> str:
        try:
            make(group, case)
        except Refused as refused:
            return str(refused)
        return ""

    return run_ranks(size, program)


def test_one_ranks_refusal_is_every_ranks_and_names_it() -> None:
    def make(group: ThreadGroup, case: ExactCase) -> None:
        bad = -3 if group.rank == 1 else 4
        case.rollout(VocabShard.deal(V, 3, group.rank), group, pool_size=bad)

    errors = errors_of_ranks(make)
    assert errors[1].startswith("pool_size: found -3")
    assert all(errors[r].startswith("rank 1: ") for r in (0, 2))


def test_ranks_with_different_settings_are_refused() -> None:
    def make(group: ThreadGroup, case: ExactCase) -> None:
        shard = VocabShard.deal(V, 3, group.rank)
        case.rollout(shard, group, pool_size=5 if group.rank == 2 else 4)

    assert set(errors_of_ranks(make)) == {"pool_size on rank 2: found 5, wanted 4, as on rank 0"}

    def make_exchange(group: ThreadGroup, case: ExactCase) -> None:
        shard = VocabShard.deal(V, 3, group.rank)
        case.rollout(shard, group, exchange="compact" if group.rank == 1 else "full")

    assert all("exchange on rank 1" in error for error in errors_of_ranks(make_exchange))


@pytest.mark.parametrize(
    "held", (((0, 7), (7, 6), (14, 6)), ((0, 7), (6, 7), (13, 7)), ((0, 7), (7, 7), (14, 5)))
)
def test_shards_that_do_not_tile_the_vocabulary_are_refused(
    held: tuple[tuple[int, int], ...],
) -> None:
    def make(group: ThreadGroup, case: ExactCase) -> None:
        start, count = held[group.rank]
        case.rollout(VocabShard(group.rank, 3, V, start, count, 7), group)

    errors = errors_of_ranks(make)
    assert all(errors), errors
    assert len(set(errors)) == 1


def test_another_ranks_shard_is_refused() -> None:
    def make(group: ThreadGroup, case: ExactCase) -> None:
        shard = VocabShard.deal(V, 3, 0)
        case.rollout(shard, group)

    errors = errors_of_ranks(make)
    assert errors[1].startswith("shard (rank, size): found (0, 3), wanted the group's (1, 3)")
    assert errors[0].startswith("rank 1: ")


@pytest.mark.parametrize("weight", ("head", "lm_head", "embedding"))
def test_ranks_with_different_dtypes_are_refused(weight: str) -> None:
    def make(group: ThreadGroup, case: ExactCase) -> None:
        shard = VocabShard.deal(V, 3, group.rank)
        dtypes = dict.fromkeys(("head", "lm_head", "embedding"), torch.bfloat16)
        if group.rank == 1:
            dtypes[weight] = torch.float16
        rows = {name: torch.zeros(V, H, dtype=dtype) for name, dtype in dtypes.items()}
        DominoRollout(
            exact_case(0, V, batch=1, steps=2, dtype=dtypes["head"]).head,
            rows["embedding"],
            rows["lm_head"][: shard.num_padded],
            shard,
            group,
            pool_size=4,
        )

    wanted = f"{weight} dtype on rank 1: found torch.float16, wanted torch.bfloat16, as on rank 0"
    assert set(errors_of_ranks(make)) == {wanted}


UNEVEN = [VocabShard(0, 3, V, 0, 4, 14), VocabShard(1, 3, V, 4, 14, 14)]
UNEVEN += [VocabShard(2, 3, V, 18, 2, 14)]
EVEN = [VocabShard(r, 3, V, 7 * r, 7 - (r == 2), 14) for r in range(3)]


def test_shards_given_by_the_caller_are_held_to_its_own_shard_and_the_group() -> None:
    def refusal(**change: object) -> str:
        with pytest.raises(Refused) as refused:
            DominoRollout(**{**parts(), **change})
        return refused.value.field

    own = VocabShard.deal(V, 1, 0)
    DominoRollout(**parts(), shards=[own])
    assert refusal(shards=[]) == "shards"
    assert refusal(shards=[VocabShard.deal(V, 2, r) for r in range(2)]) == "shards"
    assert refusal(shards=[(0, V)]) == "shards"
    assert refusal(shards=[replace(own, num_padded=V + 2)]) == "shards[0]"
    gap = replace(own, num_org=V - 2)
    assert refusal(shard=gap, shards=[gap]) == "ids held by all shards together"


def test_a_list_of_shards_that_is_not_the_ranks_own_is_refused_everywhere() -> None:
    def make(group: ThreadGroup, case: ExactCase) -> None:
        case.rollout(UNEVEN[group.rank], group, shards=EVEN)

    errors = errors_of_ranks(make)
    assert all(errors[r].startswith(f"shards[{r}]: found VocabShard(") for r in range(3))


def test_lists_of_shards_that_differ_between_ranks_are_refused() -> None:
    def make(group: ThreadGroup, case: ExactCase) -> None:
        # Rank 0's part is the same in both, so it alone sees nothing wrong with either.
        other = [UNEVEN[0], VocabShard(1, 3, V, 4, 12, 14), VocabShard(2, 3, V, 16, 4, 14)]
        case.rollout(UNEVEN[group.rank], group, shards=UNEVEN if group.rank else other)

    assert all("checksum of shards on rank 1" in error for error in errors_of_ranks(make))


def test_with_a_list_of_shards_ranks_still_tell_each_other_what_they_found() -> None:
    def refused(group: ThreadGroup, case: ExactCase) -> None:
        pool_size = -3 if group.rank == 1 else 4
        case.rollout(UNEVEN[group.rank], group, shards=UNEVEN, pool_size=pool_size)

    errors = errors_of_ranks(refused)
    assert errors[1].startswith("pool_size: found -3")
    assert all(errors[r].startswith("rank 1: ") for r in (0, 2))

    def differing(group: ThreadGroup, case: ExactCase) -> None:
        exchange = "compact" if group.rank == 1 else "full"
        case.rollout(UNEVEN[group.rank], group, shards=UNEVEN, exchange=exchange)

    wanted = "exchange on rank 1: found 'compact', wanted full, as on rank 0"
    assert set(errors_of_ranks(differing)) == {wanted}


@pytest.mark.parametrize(
    ("fields", "field"),
    (
        ((V, 0, 0), "shard.size"),
        ((V, 2, 2), "shard.rank"),
        ((0, 1, 0), "shard.vocab_size"),
        ((50.0, 1, 0), "shard.vocab_size"),
        ((V, 1.0, 0), "shard.size"),
        ((V, 1, "0"), "shard.rank"),
    ),
)
def test_what_no_vocabulary_can_be_dealt_to_is_refused(fields: tuple, field: str) -> None:
    with pytest.raises(Refused) as refused:
        VocabShard.deal(*fields)
    assert refused.value.field == field


def test_a_refused_table_needs_the_whole_embedding() -> None:
    assert choose_gate_table("auto", 2 << 30, sharded=False)
    assert not choose_gate_table("auto", (2 << 30) + 1, sharded=False)
    assert choose_gate_table("auto", (2 << 30) + 1, sharded=True)
    assert choose_gate_table(True, (2 << 30) + 1, sharded=False)
    assert not choose_gate_table(False, 1, sharded=False)
    for choice in (False, 0):
        with pytest.raises(Refused, match=f"gate_table: found {choice}"):
            choose_gate_table(choice, 1, sharded=True)


def test_an_embedding_that_may_be_whole_or_a_padded_shard_must_be_told() -> None:
    shard = VocabShard(1, 2, V, 5, 15, V)  # padded to V itself
    rows = torch.zeros(V, H)
    with pytest.raises(Refused, match="sharded_embedding"):
        holds_whole_embedding(rows, shard, None)
    assert holds_whole_embedding(rows, shard, False)
    assert not holds_whole_embedding(rows, shard, True)
    assert not holds_whole_embedding(rows[:15], shard, None)
    with pytest.raises(Refused):
        holds_whole_embedding(rows[:15], shard, False)
    plain = VocabShard.deal(V, 2, 1)
    assert holds_whole_embedding(rows, plain, None)
    with pytest.raises(Refused):
        holds_whole_embedding(rows, plain, True)


def test_the_tables_cost_is_reported() -> None:
    rollout = DominoRollout(**parts())
    assert rollout.gate_table_bytes == V * 3 * G * 2
    assert DominoRollout(**parts(torch.float32)).gate_table_bytes == V * 3 * G * 4


def test_a_head_is_not_changed_by_use() -> None:
    made = parts()
    before = {f.name: getattr(made["head"], f.name) for f in dataclasses.fields(DominoHead)}
    copies = {k: v.clone() for k, v in before.items() if isinstance(v, torch.Tensor)}
    DominoRollout(**made)(torch.ones(1, 4, H, dtype=torch.bfloat16), torch.tensor([1]))
    assert all(torch.equal(before[k], copies[k]) for k in copies)
