"""An FP8 draft head changes what is proposed and what it costs, never what is emitted."""

from __future__ import annotations

import logging

import pytest
import torch

from knockon.engine import assemble, settle
from knockon.engine.config import EngineConfig
from knockon.errors import Refused
from tests.engine.generation import (
    GREEDY,
    TinyShelf,
    load,
    mean_accept_length,
    random_prompts,
    target_only,
    tokens,
)
from tests.tiny_models import HIDDEN
from tests.tiny_tokenizer import VOCAB_SIZE

PROMPTS = random_prompts(6)
FP8 = {"speculative_draft_head_dtype": "fp8"}


@pytest.mark.parametrize("drafter", ["dflash", "domino"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_greedy_equals_the_target_alone(
    tiny: TinyShelf, drafter: str, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, draft = tiny.target(), tiny.drafter(drafter)
    settings = FP8 | {"verify_width": 8, "tp_size": ranks}
    settings["speculative_domino_candidate_pool_size"] = 24
    with caplog.at_level(logging.INFO), load(model, draft, **settings) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        metrics = llm.metrics()
    assert tokens(outputs) == tokens(target_only(model, PROMPTS))
    assert 1.1 < mean_accept_length(outputs) < 8
    rows = -(-VOCAB_SIZE // ranks)
    padded = -(-rows // 16) * 16
    assert metrics.draft_head_dtype == "fp8"
    assert metrics.draft_head_bytes == padded * (HIDDEN + 4)
    if ranks == 1:
        assert "LM head in FP8, for proposals only" in caplog.text


@pytest.mark.parametrize("drafter", ["dflash", "domino"])
def test_proposals_come_from_the_copy_and_the_target_keeps_its_head(
    tiny: TinyShelf, drafter: str
) -> None:
    """With every code turned round, what is proposed is the least likely; what is emitted stays."""
    model, draft = tiny.target(), tiny.drafter(drafter)
    with load(model, draft, verify_width=8, **FP8) as llm:
        assert llm._engine is not None and llm._engine.runner.drafter is not None
        made = llm._engine.runner.drafter
        backbone = getattr(made, "backbone", made) if drafter == "domino" else made
        backbone.proposing.fp8.scales.neg_()
        outputs = llm.generate(PROMPTS, GREEDY)
    assert tokens(outputs) == tokens(target_only(model, PROMPTS))
    assert mean_accept_length(outputs) < 1.1


def test_without_one_the_metrics_name_the_targets_own(tiny: TinyShelf) -> None:
    for drafter in ("dflash", "domino"):
        with load(tiny.target(), tiny.drafter(drafter), verify_width=8) as llm:
            metrics = llm.metrics()
        assert (metrics.draft_head_dtype, metrics.draft_head_bytes) == ("float32", 0)
    with load(tiny.target()) as llm:
        assert llm.metrics().draft_head_dtype is None


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"speculative_draft_head_dtype": "fp4"}, "one of auto, fp8"),
        (FP8, "auto where no draft is given"),
    ],
)
def test_a_head_that_cannot_be_is_refused_by_name(settings: dict[str, str], wanted: str) -> None:
    with pytest.raises(Refused, match=wanted) as refused:
        EngineConfig("model", **settings)
    assert refused.value.field == "speculative_draft_head_dtype"


def test_a_device_that_multiplies_no_fp8_is_refused_before_anything_is_loaded(
    tiny: TinyShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settle, "fp8_obstacle", lambda device: f"{device} has no FP8")
    monkeypatch.setattr(assemble, "load_target", lambda *args: pytest.fail("loaded"))
    with pytest.raises(Refused, match=r"speculative_draft_head_dtype.*cpu has no FP8"):
        load(tiny.target(), tiny.drafter("domino"), **FP8)


def test_fp64_is_refused(tiny: TinyShelf) -> None:
    with pytest.raises(Refused, match=r"speculative_draft_head_dtype.*float64"):
        load(tiny.target(), tiny.drafter("domino"), dtype="float64", **FP8)


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", ["dflash", "domino"])
def test_on_a_gpu_the_target_still_decides(tiny: TinyShelf, drafter: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 products")
    model, draft = tiny.target(), tiny.drafter(drafter)
    cuda = {"device": "cuda", "kv_memory": 64 << 20, "max_batch_size": 8}
    with load(model, None, **cuda) as llm:
        alone = llm.generate(PROMPTS, GREEDY)
    with load(model, draft, verify_width=8, **cuda, **FP8) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        metrics = llm.metrics()
    assert tokens(outputs) == tokens(alone)
    assert metrics.draft_head_dtype == "fp8" and mean_accept_length(outputs) > 1.1
