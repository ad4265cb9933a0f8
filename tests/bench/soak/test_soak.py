"""The soak on a tiny model: it passes on the engine, and sees what it is there to see."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from knockon.bench.soak.checks import Difference, check_answers, check_idle, check_memory
from knockon.bench.soak.run import Soak, SoakRun
from knockon.bench.soak.traffic import KINDS, Traffic
from knockon.engine.assemble import build_engine
from knockon.engine.config import EngineConfig
from knockon.engine.engine import Engine
from knockon.engine.sampling_params import SamplingParams
from knockon.engine.settle import check
from knockon.parallel import SingleRank
from tests.tiny_models import TinyDrafter, TinyTarget

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "engine_soak.py"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("soak")
    target = TinyTarget().save(folder / "target")
    return target, TinyDrafter().save(folder / "draft", target)


def tiny_engine(tiny: tuple[Path, Path]) -> Engine:
    target, draft = map(str, tiny)
    config = EngineConfig(
        target,
        draft=draft,
        dtype="float32",
        device="cpu",
        verify_width=4,
        max_model_len=128,
        max_batch_size=4,
        kv_memory=2 << 20,
        page_size=4,
    )
    return build_engine(check(config), SingleRank())


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_every_check_passes_after_mixed_traffic(
    tiny: tuple[Path, Path], tmp_path: Path, overlap: bool
) -> None:
    target, draft = map(str, tiny)
    main = runpy.run_path(str(SCRIPT))["main"]
    arguments = ["--model", target, "--draft", draft, "--device", "cpu", "--out", str(tmp_path)]
    arguments += [
        "--seconds",
        "1",
        "--requests",
        "120",
        "--longest-prompt",
        "60",
        "--longest-output",
        "100",
    ]
    arguments += ["--max-batch-size", "12", "--kv-memory", "1", "--sample", "16"]
    main(arguments + ["--overlap"] * overlap)
    result = json.loads((tmp_path / "engine_soak_float32.json").read_text())
    assert result["passed"] and result["compared"] == 16 and not result["differences"]
    assert set(result["sent"]) == set(KINDS) and result["cached_tokens"] > 0
    assert result["preemptions"] > 0 and result["finish_reasons"]["abort"] > 0
    assert sum(result["finish_reasons"].values()) == result["requests"]
    assert len(result["steps_by_width"]) > 1


def test_a_page_that_is_kept_is_found(tiny: tuple[Path, Path]) -> None:
    engine = tiny_engine(tiny)
    run = Soak(engine, Traffic(range(300), 40, 12, 0), 4, 0).run(0, 30)
    assert all(each.passed for each in check_idle(engine, run))
    assert len(run.samples) == 4
    assert engine.scheduler.pool.allocate(1) is not None
    failed = {each.name for each in check_idle(engine, run) if not each.passed}
    assert failed == {"all pages are back", "all pages are back again"}


def test_a_request_that_never_ends_is_found(tiny: tuple[Path, Path]) -> None:
    engine = tiny_engine(tiny)
    run = Soak(engine, Traffic(range(300), 40, 12, 0), 4, 0).run(0, 3)
    engine.add("late", [1, 2, 3], SamplingParams(temperature=0, max_tokens=20), 0)
    engine.step()
    failed = {each.name for each in check_idle(engine, run) if not each.passed}
    assert {"nothing waits, runs or is in flight", "all pages are back"} <= failed


def test_traffic_is_the_seeds_and_of_every_sort() -> None:
    first, again = (Traffic(range(5000), 1500, 400, 3) for _ in range(2))
    found = [first.next() for _ in range(400)]
    assert found == [again.next() for _ in range(400)]
    assert {request.kind for request in found} == set(KINDS)
    lengths = [len(request.prompt) for request in found]
    assert min(lengths) == 1 and 1000 < max(lengths) <= 1500
    assert sum(request.abort_after is not None for request in found) > 10
    prefixes = [tuple(request.prompt[:8]) for request in found if len(request.prompt) > 8]
    assert len(set(prefixes)) < len(prefixes)


def test_memory_that_grows_is_found() -> None:
    flat = SoakRun(memory=[(0.0, 50), (30.0, 100), (90.0, 102)])
    grown = SoakRun(memory=[(0.0, 100), (30.0, 100), (90.0, 110)])
    assert check_memory(flat, 100).passed and not check_memory(grown, 100).passed
    assert check_memory(SoakRun(), 100).passed is None


def test_a_wrong_answer_is_told_from_a_near_tie() -> None:
    near = Difference("0", "greedy", 5, 3, 1e-5)
    wrong = Difference("1", "greedy", 5, 3, 0.2)
    short = Difference("2", "greedy", 5, 3, None)
    assert check_answers([near], 8, "float32").passed
    for difference in (wrong, short):
        assert not check_answers([near, difference], 8, "float32").passed
    assert check_answers([wrong], 8, "bfloat16").passed is None
    assert not check_answers([], 0, "float32").passed
