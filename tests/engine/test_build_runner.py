"""The runner is made as the settings say."""

from __future__ import annotations

import pytest

from knockon.engine.assemble import build_engine
from knockon.engine.config import EngineConfig
from knockon.engine.pipelined import PipelinedRunner
from knockon.engine.settle import check
from knockon.errors import Refused
from knockon.parallel import SingleRank
from tests.engine.generation import TinyShelf


def test_graphs_are_made_for_batches_up_to_the_largest_asked_for(
    tiny: TinyShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[int] = []
    monkeypatch.setattr(PipelinedRunner, "capture", lambda self, widths: captured.extend(widths))
    asked = EngineConfig(str(tiny.target()), dtype="float32", device="cpu", max_batch_size=12)
    config = check(asked).replace(cuda_graph=True, overlap_schedule=True)
    for most, buckets in ((None, (1, 2, 4, 8, 12)), (3, (1, 2, 3)), (99, (1, 2, 4, 8, 12))):
        engine = build_engine(config.replace(cuda_graph_max_bs=most), SingleRank())
        assert isinstance(engine.runner, PipelinedRunner)
        assert engine.runner.buckets == buckets
    assert captured == [1, 1, 1]


def test_a_largest_batch_below_one_is_refused() -> None:
    with pytest.raises(Refused, match="cuda_graph_max_bs: found 0, wanted an integer of at least"):
        EngineConfig("m", cuda_graph_max_bs=0)
