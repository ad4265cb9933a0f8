"""The published rule for choosing an exchange."""

from __future__ import annotations

from knockon.parallel import VocabShard
from knockon.rollout import choose_exchange
from tests.rollout.exact_cases import exact_case
from tests.rollout.thread_ranks import ThreadGroup, run_ranks

MIB = 1 << 20


def test_inside_a_graph_full_at_batch_one_and_compact_above() -> None:
    assert choose_exchange(1, 500 * MIB, True, 2048) == "full"
    assert choose_exchange(2, 1, True, 2048) == "compact"
    assert choose_exchange(4, 1, True, 2048, graph_full_batch=4) == "full"


def test_eager_compact_once_the_gathered_logits_pass_96_mib() -> None:
    assert choose_exchange(64, 96 * MIB, False, 2048) == "full"
    assert choose_exchange(1, 96 * MIB + 1, False, 2048) == "compact"
    assert choose_exchange(1, 11, False, 2048, eager_full_bytes=10) == "compact"


def test_no_pool_is_always_full_and_one_rank_has_nothing_to_exchange() -> None:
    assert choose_exchange(64, 500 * MIB, True, 0) == "full"
    assert choose_exchange(64, 500 * MIB, True, 0, requested="compact") == "full"
    assert choose_exchange(64, 500 * MIB, True, 2048, ranks=1) == "full"


def test_a_choice_by_hand_is_kept() -> None:
    for requested in ("full", "compact"):
        for in_graph in (False, True):
            chosen = choose_exchange(8, 500 * MIB, in_graph, 64, requested=requested)
            assert chosen == requested


def test_the_exchange_foretold_is_the_one_taken() -> None:
    for batch, pool_size, wanted in ((1, 9, "full"), (2, 9, "compact"), (2, 0, "full")):
        case = exact_case(2, 40, batch=batch, steps=5)

        def program(group: ThreadGroup, case=case, pool_size=pool_size) -> tuple[str, str]:
            rollout = case.rollout(VocabShard.deal(40, 2, group.rank), group, pool_size=pool_size)
            rollout(case.draft_hidden, case.bonus, 5, in_graph=True)
            return rollout.exchange_taken, rollout.exchange_for(len(case.bonus), 5, in_graph=True)

        assert run_ranks(2, program) == [(wanted, wanted)] * 2
