"""The metrics say what was done: which exchange, how many blocks, what was accepted, which NaN."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from knockon.engine.metrics import EngineMetrics
from knockon.engine.request import RequestOutput
from knockon.errors import Refused
from tests.engine.generation import DRAFTERS, GREEDY, TinyShelf, load, random_prompts
from tests.tiny_tokenizer import VOCAB_SIZE

PROMPTS = random_prompts(5, seed=3, high=30)
POOL, EXCHANGE = "speculative_domino_candidate_pool_size", "speculative_domino_exchange"


def check_counts(metrics: EngineMetrics, outputs: Sequence[RequestOutput]) -> None:
    lengths = Counter(n for output in outputs for n in output.metrics.accept_lengths)
    assert metrics.accept_lengths == lengths
    assert list(metrics.accept_lengths) == sorted(lengths)
    count = sum(lengths.values())
    assert metrics.mean_accept_length == pytest.approx(
        sum(n * times for n, times in lengths.items()) / count
    )
    assert metrics.blocks == (count if metrics.draft else 0)
    assert max(len(o.metrics.accept_lengths) for o in outputs) <= metrics.steps <= count


@pytest.mark.parametrize(
    ("ranks", "pool", "exchange", "taken"),
    [
        (1, 24, "auto", "full"),
        (1, 24, "full", "full"),
        (1, 24, "compact", "compact"),
        (1, 0, "compact", "full"),
        (2, 24, "auto", "full"),
        (2, 24, "compact", "compact"),
        (2, 0, "compact", "full"),
    ],
)
def test_the_exchange_taken_is_counted_every_step(
    tiny: TinyShelf, ranks: int, pool: int, exchange: str, taken: str
) -> None:
    settings = {"verify_width": 8, "tp_size": ranks, POOL: pool, EXCHANGE: exchange}
    with load(tiny.target(), tiny.drafter("domino"), **settings) as llm:
        fresh = llm.metrics()
        outputs = llm.generate(PROMPTS, GREEDY)
        metrics = llm.metrics()
    assert (fresh.steps, fresh.blocks, fresh.exchanges, fresh.accept_lengths) == (0, 0, {}, {})
    assert (metrics.draft, metrics.verify_width) == ("domino", 8)
    assert (metrics.candidate_pool_size, metrics.exchange) == (pool, exchange)
    assert metrics.exchanges == {taken: metrics.steps}
    assert metrics.gate_table_bytes == VOCAB_SIZE * 3 * DRAFTERS["domino"].gru * 4
    assert metrics.nan_rows == 0
    check_counts(metrics, outputs)
    with pytest.raises(Refused, match="closed"):
        llm.metrics()


def test_auto_is_counted_by_each_steps_own_size(
    tiny: TinyShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"verify_width": 8, POOL: 24}
    with load(tiny.target(), tiny.drafter("domino"), **settings) as llm:
        assert llm._engine is not None and llm._engine.runner.drafter is not None
        drafter = llm._engine.runner.drafter
        monkeypatch.setattr(
            type(drafter), "exchange_for", lambda self, batch, steps: ("full", "compact")[batch > 2]
        )
        llm.generate(PROMPTS, GREEDY)
        metrics = llm.metrics()
    assert sorted(metrics.exchanges) == ["compact", "full"]
    assert sum(metrics.exchanges.values()) == metrics.steps


def test_a_pool_as_large_as_the_vocabulary_is_told_as_none(tiny: TinyShelf) -> None:
    with load(tiny.target(), tiny.drafter("domino"), verify_width=8) as llm:
        llm.generate(PROMPTS[:1], GREEDY)
        assert llm.metrics().candidate_pool_size == 0
        assert llm.config.speculative_domino_candidate_pool_size == 2048


def test_other_drafters_and_none_have_no_exchange(tiny: TinyShelf) -> None:
    for drafter, name, width in (("dflash", "dflash", 8), ("domino", None, 1), (None, None, None)):
        draft = tiny.drafter(drafter) if drafter else None
        with load(tiny.target(), draft, verify_width=width) as llm:
            outputs = llm.generate(PROMPTS, GREEDY)
            metrics = llm.metrics()
        assert (metrics.draft, metrics.verify_width) == (name, width or 1)
        assert metrics.candidate_pool_size is metrics.exchange is None
        assert (metrics.exchanges, metrics.gate_table_bytes, metrics.nan_rows) == ({}, 0, 0)
        check_counts(metrics, outputs)


@pytest.mark.parametrize("ranks", [1, 2])
def test_nan_rows_of_every_ranks_shard_are_counted(
    tiny: TinyShelf, tmp_path: Path, ranks: int
) -> None:
    """A head whose last row, which the last rank holds, is NaN: a NaN in every row of every block.

    NaN loses to every number, so the chain goes on without that id.
    """
    model = tmp_path / "target"
    model.mkdir()
    for file in tiny.target().iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"][-1] = torch.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with load(model, tiny.drafter("domino"), verify_width=8, tp_size=ranks) as llm:
        llm.generate(PROMPTS[:2], GREEDY)
        metrics = llm.metrics()
    assert metrics.nan_rows == 7 * metrics.blocks > 0


def test_steps_are_timed_and_their_parts_where_those_run_one_by_one(tiny: TinyShelf) -> None:
    for in_flight, parts in ((False, {"draft", "verify", "commit"}), (True, set())):
        settings = {"verify_width": 8, "overlap_schedule": in_flight}
        with load(tiny.target(), tiny.drafter("domino"), **settings) as llm:
            llm.generate(PROMPTS, GREEDY)
            metrics = llm.metrics()
        assert metrics.steps - in_flight <= metrics.timed_steps <= metrics.steps
        assert set(metrics.part_seconds) == parts
        assert all(seconds > 0 for seconds in metrics.part_seconds.values())
        assert sum(metrics.part_seconds.values()) <= metrics.step_seconds
