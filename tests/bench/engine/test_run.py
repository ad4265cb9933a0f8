"""The benchmark on a tiny model: the real engine, through the command, to its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from knockon.bench.engine import assemble, run
from knockon.bench.engine.report import EngineReport
from knockon.bench.engine.run import Drafting, VariantBench, measure, requests_in
from knockon.bench.engine.settings import settle
from knockon.bench.engine.synthetic import SyntheticAccept, count_steps
from knockon.bench.engine.variant import Variant
from knockon.bench.engine.weights import random_target
from knockon.cli.app import app
from knockon.engine.config import EngineConfig
from knockon.engine.settle import settle as settle_engine
from knockon.errors import Refused

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
REFERENCES = Path(__file__).parents[3] / "benchmarks" / "references"


@pytest.fixture
def model(tmp_path) -> str:
    folder = tmp_path / "two-layers"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def bench(*arguments: str):
    return CliRunner().invoke(app, ["bench", "engine", "--device", "cpu", *arguments])


def test_a_target_with_recurrent_layers(tmp_path):
    file = tmp_path / "engine.json"
    done = bench(
        *("--model", "tiny-hybrid", "--concurrency", "2", "--input-len", "9", "--output-len", "16"),
        *("--accept-length", "domino=5", "--pool-size", "64", "--json", str(file)),
    )
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    for row in found["results"]:
        assert row["runs"][0]["tokens"] == 16 * row["num_prompts"]
    for facts in found["facts"].values():
        assert (facts["prompts_by"], facts["state_dtype"]) == ("torch", "float32")


def test_weights_larger_than_memory_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr(run, "available_memory", lambda device: 1000)
    done = bench("--model", "tiny", "--output-len", "8")
    assert isinstance(done.exception, Refused) and done.exception.field == "model"
    assert "available on cpu" in str(done.exception)


def test_the_command_writes_tables_json_and_a_plot(model, tmp_path):
    file, plot = tmp_path / "engine.json", tmp_path / "engine.png"
    done = bench(
        *("--model", model, "--concurrency", "1,2", "--input-len", "9", "--output-len", "24"),
        *("--accept-length", "dflash=3,domino=5", "--pool-size", "64", "--profile"),
        *("--reference", str(REFERENCES / "vllm_0.25.1_qwen3_8b.json")),
        *("--json", str(file), "--plot", str(plot)),
    )
    assert done.exit_code == 0, done.output
    assert "Engine, two-layers (random weights), float32, CPU" in done.stdout
    assert "2 requests in flight" in done.stdout and "× target" in done.stdout
    assert "It was not measured alike: model qwen3-8b, here two-layers" in done.stdout
    assert "CPU operators" in done.stdout
    assert plot.stat().st_size > 10_000
    data = json.loads(file.read_text())
    assert data["environment"]["versions"]["torch"]
    assert data["shape"]["target"]["hidden_size"] == 32
    rows = {(row["method"], row["concurrency"]): row for row in data["results"]}
    assert len(rows) == 6
    for (method, concurrency), row in rows.items():
        assert row["label"] == ("target" if method == "target" else f"{method} w16")
        assert row["num_prompts"] == 2 * concurrency
        [run] = row["runs"]
        assert run["tokens"] == 24 * row["num_prompts"]
        assert row["tokens_per_second"] == pytest.approx(run["tokens"] / run["seconds"], rel=1e-3)
        assert row["step_ms"] > 0 and row["time_to_first_token_ms"] > 0
        asked = {"target": 1, "dflash": 3, "domino": 5}[method]
        assert row["accept_length_asked"] == asked
        assert row["accept_length"] == pytest.approx(asked, rel=0.15)
        profile = row["profile"]
        assert profile["kind"] == "CPU operators" and profile["idle"] is None
        assert profile["parts_ms"]["matmul"] > 0 and profile["parts_ms"]["attention"] > 0
        assert profile["busy_ms"] == pytest.approx(sum(profile["parts_ms"].values()), abs=0.01)
    assert rows["target", 2]["times_target"] == 1
    assert rows["dflash", 1]["times_reference"] > 0
    assert rows["domino", 1]["times_reference"] is None
    assert data["facts"]["domino w16"]["rollout"] == "plain"


@pytest.mark.parametrize("overlap", (False, True))
def test_the_engine_takes_the_steps_that_the_seeds_foretell(model, overlap, monkeypatch):
    def settle_so(config: EngineConfig) -> EngineConfig:
        return settle_engine(config.replace(overlap_schedule=overlap))

    monkeypatch.setattr(assemble, "settle", settle_so)
    settings = settle(
        model=model,
        device="cpu",
        methods=("dflash",),
        concurrency=(3,),
        input_len=7,
        output_len=30,
        accept_lengths={"dflash": 4.0},
    )
    target = random_target(settings.shape.target, settings.torch_dtype, torch.device("cpu"), 256, 0)
    ended: list[None] = []
    drafting = Drafting(settings, "dflash", target)
    made = VariantBench(
        *(settings, Variant("dflash", 16), target, drafting),
        *(lambda text: None, lambda: ended.append(None)),
    )
    prompts, seeds = made._requests(6, 30)
    result = made._serve(3, 6, 30)
    assert made.engine.runner.lag == overlap and result.full_steps > 0
    steps = sum(made.engine.metrics().accept_lengths.values())
    assert steps == int(count_steps(made.accept, torch.tensor(seeds), 7, 30).sum())
    assert len(ended) == 6 and len(set(map(tuple, prompts))) == 6
    assert not made.engine.has_unfinished


def test_every_request_is_counted_and_every_measurement_told(model):
    settings = settle(
        model=model,
        device="cpu",
        methods=("target", "domino"),
        concurrency=(2,),
        num_prompts=3,
        input_len=4,
        output_len=8,
        pool_size=0,
        repeats=2,
    )
    ended: list[None] = []
    lines: list[str] = []
    partial: list[EngineReport] = []
    report = measure(
        settings, ended=lambda: ended.append(None), done=lines.append, so_far=partial.append
    )
    assert [len(found.to_json()["results"]) for found in partial] == [1, 2]
    assert partial[-1] == report
    assert len(ended) == requests_in(settings) == 2 * (2 + 2 * 3)
    assert [line.split()[0] for line in lines] == ["target", "domino"]
    assert [len(found.runs) for found in report.measurements] == [2, 2]
    assert not report.profiled and report.at("domino", 8) is None


def test_every_width_serves_the_same_requests_with_one_law_cut_off(model, tmp_path):
    file, plot = tmp_path / "engine.json", tmp_path / "engine.png"
    done = bench(
        *("--model", model, "--methods", "target,domino", "--concurrency", "2", "--pool-size", "0"),
        *("--verify-width", "4,16,auto", "--alternate", "1,3", "--draft-head-dtype", "fp8"),
        *("--input-len", "5", "--output-len", "40", "--accept-length", "domino=5"),
        *("--json", str(file), "--plot", str(plot)),
    )
    assert done.exit_code == 0, done.output
    assert "× best fixed" in done.stdout and "alternating between 1 and 3" in done.stdout
    data = json.loads(file.read_text())
    assert data["settings"]["verify_widths"] == [4, 16, "auto"]
    rows = {row["label"]: row for row in data["results"]}
    assert list(rows) == ["target", "domino w4", "domino w16", "domino auto"]
    assert data["facts"]["domino auto"]["draft_head_dtype"] == "fp8"
    narrow, wide, auto = (rows[f"domino {which}"] for which in ("w4", "w16", "auto"))
    assert wide["accept_length_asked"] == 5 and auto["accept_length_asked"] is None
    assert narrow["accept_length_asked"] == pytest.approx(SyntheticAccept(5, 16).mean_at(4), 1e-3)
    for row in (narrow, wide):
        assert row["accept_length"] == pytest.approx(row["accept_length_asked"], rel=0.15)
        assert row["times_best_fixed"] is None and list(row["width_shares"].values()) == [1]
    best = max(narrow["tokens_per_second"], wide["tokens_per_second"])
    assert auto["times_best_fixed"] == pytest.approx(auto["tokens_per_second"] / best, rel=1e-3)
    assert sum(auto["width_shares"].values()) == pytest.approx(1, abs=1e-3)
    assert [found["label"] for found in data["alternating"]] == list(rows)[1:]
    for found in data["alternating"]:
        assert [phase["tokens"] for phase in found["phases"]] == [3 * 40, 3 * 40] * 2
        seconds = sum(phase["seconds"] for phase in found["phases"])
        assert found["tokens_per_second"] == pytest.approx(4 * 3 * 40 / seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("field", "arguments"),
    (
        ("model", ("--model", "nameless")),
        ("methods", ("--methods", "target,eagle")),
        ("concurrency", ("--concurrency", "one")),
        ("accept_length", ("--accept-length", "domino")),
        ("accept_length of domino", ("--accept-length", "domino=20")),
        ("narrow_accept_length", ("--narrow-accept-length", "domino@8=6,domino@4=3")),
        ("verify_width", ("--verify-width", "40")),
        ("verify_width", ("--verify-width", "8,any")),
        ("alternate", ("--alternate", "8")),
        ("draft_head_dtype", ("--draft-head-dtype", "int4")),
        ("reference", ("--reference", "/no/such/file.json")),
        ("json", ("--json", "/no/such/folder/file.json")),
        ("plot", ("--plot", "/no/such/folder/engine.png")),
    ),
)
def test_bad_input_is_refused_by_field_before_anything_runs(
    field, arguments, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    done = bench(*arguments)
    assert isinstance(done.exception, Refused) and done.exception.field == field
    assert not done.stdout
