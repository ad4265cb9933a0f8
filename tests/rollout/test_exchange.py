"""The published rule for choosing an exchange."""

from __future__ import annotations

from knockon.rollout import choose_exchange

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
