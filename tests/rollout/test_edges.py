"""What callers may pass: strides, dtypes and numbers that a caller of another engine has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from knockon.errors import Refused
from knockon.parallel import SingleRank, VocabShard
from knockon.rollout import DominoHead, DominoRollout
from knockon.rollout.fused import best_k as best_k_module
from tests.rollout.exact_cases import ExactCase, exact_case

V = 29
SHARD = VocabShard.deal(V, 1, 0)
IMPLEMENTATIONS = ("plain", "fused")


def implementation_here(name: str) -> str:
    if name == "fused" and torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no device")
    if name == "fused":
        pytest.importorskip("triton")
    return name


def case_of(seed: int) -> ExactCase:
    return exact_case(seed, V, batch=2, steps=4, dtype=torch.float32)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_an_lm_head_may_give_logits_in_any_layout(name: str) -> None:
    implementation, case = implementation_here(name), case_of(1)
    made = case.rollout(SHARD, SingleRank(), pool_size=9, implementation=implementation)
    logits = made._logits
    made._logits = lambda x: logits(x).t().contiguous().t()
    assert case.propose(made) == case.oracle(9)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_weights_may_be_views(name: str) -> None:
    implementation, case = implementation_here(name), case_of(2)
    wide = torch.cat((case.head.correction_out, torch.full((V, 2), 5.0)), dim=1)
    for view in (case.head.correction_out.t().contiguous().t(), wide[:, :-2]):
        there = replace(case, head=replace(case.head, correction_out=view))
        made = there.rollout(SHARD, SingleRank(), pool_size=9, implementation=implementation)
        assert there.propose(made) == case.oracle(9)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_bonus_tokens_may_be_a_column_and_int32(name: str) -> None:
    implementation, case = implementation_here(name), case_of(3)
    made = case.rollout(SHARD, SingleRank(), pool_size=9, implementation=implementation)
    column = torch.stack((case.bonus, case.bonus + 1), dim=1)[:, 0]
    for bonus in (column, case.bonus.int()):
        proposed = made(case.draft_hidden, bonus, steps=case.steps)
        assert proposed.dtype == torch.int64
        assert proposed.tolist() == case.oracle(9)


def test_rollouts_that_share_a_head_share_what_the_kernels_keep() -> None:
    case = case_of(8)
    made = case.rollout(
        SHARD, SingleRank(), pool_size=9, implementation=implementation_here("fused")
    )
    other = made.with_settings(5)
    assert other._fused is made._fused
    assert case.propose(other) == case.oracle(5)


def test_bonus_tokens_that_are_no_integers_are_refused() -> None:
    case = case_of(4)
    made = case.rollout(SHARD, SingleRank(), pool_size=9)
    for bonus in (case.bonus.float(), case.bonus.bool()):
        with pytest.raises(Refused, match="bonus dtype"):
            made(case.draft_hidden, bonus)


@pytest.mark.parametrize("pool_size", ("9", None, 2.5, True, -1))
def test_a_pool_size_that_is_no_number_of_ids_is_refused(pool_size: object) -> None:
    with pytest.raises(Refused, match="pool_size"):
        case_of(5).rollout(SHARD, SingleRank(), pool_size=pool_size)


def test_a_pool_larger_than_any_vocabulary_is_the_whole_one() -> None:
    assert case_of(6).rollout(SHARD, SingleRank(), pool_size=10**30).pool_size == 0


def test_an_lm_head_of_another_width_or_precision_is_refused() -> None:
    case = case_of(7)
    made = case.rollout(SHARD, SingleRank(), pool_size=9)
    logits = made._logits
    made._logits = lambda x: logits(x)[:, :-1]
    with pytest.raises(Refused, match="lm_head output shape"):
        case.propose(made)
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.float8_e4m3fn):
        made._logits = lambda x, dtype=dtype: logits(x).to(dtype)
        with pytest.raises(Refused, match="lm_head output dtype"):
            case.propose(made)
    made._logits = lambda x: None
    with pytest.raises(Refused, match="lm_head output: found 'NoneType', wanted a tensor"):
        case.propose(made)


@pytest.mark.parametrize("steps", (2.0, "3", True, -1, 5))
def test_steps_that_are_no_number_of_rows_are_refused(steps: object) -> None:
    case = case_of(9)
    made = case.rollout(SHARD, SingleRank(), pool_size=9)
    with pytest.raises(Refused, match=r"^steps: .* an int from 0 to"):
        made(case.draft_hidden[:, :4], case.bonus, steps)


def test_no_row_gives_no_proposal_and_is_refused_where_no_number_is_asked_for() -> None:
    case = case_of(9)
    made = case.rollout(SHARD, SingleRank(), pool_size=9)
    empty = case.draft_hidden[:, :0]
    assert made(empty, case.bonus, 0).shape == (2, 0)
    with pytest.raises(Refused, match="L at least 1"):
        made(empty, case.bonus)
    with pytest.raises(Refused, match="0 to 0 for 0 drafted rows"):
        made(empty, case.bonus, 1)


def test_a_block_of_another_kind_is_refused_by_name() -> None:
    case = case_of(10)
    made, z = case.rollout(SHARD, SingleRank(), pool_size=9), case.draft_hidden
    refused = {
        "draft_hidden dtype": (z.long(), z.double(), z.to(torch.complex64)),
        "draft_hidden device": (z.to("meta"),),
        "draft_hidden shape": (z[0], z[:, :0]),
        "draft_hidden width": (z[..., :-1],),
        "draft_hidden": (z.tolist(),),
    }
    for field, blocks in refused.items():
        for block in blocks:
            with pytest.raises(Refused) as found:
                made(block, case.bonus)
            assert found.value.field == field
    with pytest.raises(Refused, match="bonus: found 'list', wanted a tensor"):
        made(z, case.bonus.tolist())


def test_one_row_gives_one_proposal_where_labels_are_shifted() -> None:
    case = case_of(11)
    for shift_label, most in ((True, 1), (False, 0)):
        there = replace(case, head=replace(case.head, shift_label=shift_label))
        made = there.rollout(SHARD, SingleRank(), pool_size=0)
        row = there.draft_hidden[:, :1]
        made._logits = lambda x: torch.zeros(len(x), V)
        assert made(row, case.bonus, most).shape == (2, most)
        with pytest.raises(Refused, match=f"0 to {most} for 1 drafted rows"):
            made(row, case.bonus, most + 1)


def test_a_pool_of_the_whole_vocabulary_is_said_to_have_no_kernels() -> None:
    with pytest.raises(Refused, match="K = 0, or K >= V") as refused:
        case_of(12).rollout(SHARD, SingleRank(), pool_size=V, implementation="fused")
    assert refused.value.field == "implementation"


def test_infinite_activations_do_not_make_nan_win() -> None:
    """inf * 0 is NaN, which loses: the second of four ids has a zero weight and the best logit."""
    dtype = torch.bfloat16
    weights = {
        "gru_input": torch.zeros(3, 1, dtype=dtype),
        "gru_state": torch.zeros(3, 1, dtype=dtype),
        "correction_in": torch.tensor([[1.0, 0.0]], dtype=dtype),
        "correction_out": torch.tensor([[1.0], [0.0], [1.0], [1.0]], dtype=dtype),
    }
    head = DominoHead(**weights, prefix_len=0, shift_label=True)
    base = torch.tensor([[0.0, 9.0, 8.0, 7.0]], dtype=dtype)
    rollout = DominoRollout(
        head,
        torch.zeros(4, 1, dtype=dtype),
        lambda x: base,
        VocabShard.deal(4, 1, 0),
        SingleRank(),
        pool_size=3,
    )
    hidden = torch.full((1, 1, 1), float("inf"), dtype=dtype)
    assert rollout(hidden, torch.tensor([0]), steps=1).tolist() == [[2]]


def test_offers_may_be_strided(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where each of two ranks offers one id."""
    implementation_here("fused")
    monkeypatch.setattr(best_k_module, "runs_on", lambda tensor: True)
    gathered = torch.tensor([[[5, 0], [3, 0]], [[7, 1], [2, 1]]], dtype=torch.int32)  # [R, B, 2]
    keys, ids = (x.transpose(0, 1).flatten(1) for x in gathered.split([1, 1], dim=2))
    assert not keys.is_contiguous()
    assert best_k_module.best_k(keys, ids, 1).tolist() == [[1], [0]]
