"""The benchmark measures the real server, and says what happened and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from knockon.bench.serving.request import Timed
from knockon.bench.serving.run import BenchFailed, measure
from knockon.bench.serving.settings import ServingSettings
from knockon.bench.serving.summary import summarise
from knockon.cli.app import app
from tests.engine.conftest import tiny as tiny
from tests.server.conftest import server as server
from tests.server.conftest import tiny_arguments as tiny_arguments
from tests.server.running import KEY, ServerProcess

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"turns": [f"Tell me of {i}."]}) for i in range(8)))
    return path


@pytest.mark.parametrize("chat", [True, False])
def test_a_run_counts_what_the_server_gave(
    server: ServerProcess, dataset: Path, chat: bool
) -> None:
    settings = ServingSettings(
        server.url,
        dataset,
        num_prompts=6,
        output_len=12,
        max_concurrency=3,
        warmup_requests=2,
        chat=chat,
        flush_cache=True,
        api_key=KEY,
    )
    report = measure(settings)
    found = report.summary
    assert (found.completed, found.failed) == (6, 0)
    assert found.output_tokens == 6 * 12
    assert found.output_throughput == pytest.approx(72 / found.duration)
    assert found.total_throughput > found.output_throughput
    assert found.accept_length is not None and found.accept_length > 1
    assert 0 < found.concurrency <= 3
    assert found.e2e.p99 >= found.e2e.median > found.ttft.median > 0
    assert all(each.finish_reason == "length" for each in report.requests)
    assert report.server is not None and report.server["metrics"]["draft"] == "domino"


def test_the_command_prints_tables_and_writes_json(
    server: ServerProcess, dataset: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    done = CliRunner().invoke(
        app,
        [
            *("bench", "serving", "--base-url", server.url + "/v1", "--api-key", KEY),
            *("--dataset-path", str(dataset), "--sharegpt-output-len", "4"),
            *("--request-rate", "50", "--apply-chat-template", "--output-details"),
            *("--disable-tqdm", "--output-file", str(out)),
        ],
    )
    assert done.exit_code == 0, done.output
    assert "output tok/s" in done.output and "TPOT" in done.output
    found = json.loads(out.read_text())
    assert len(found["requests"]) == 8
    assert found["summary"]["output_tokens"] == 32
    assert KEY not in out.read_text()


def test_failures_are_counted_and_named(server: ServerProcess, dataset: Path) -> None:
    too_long = json.dumps({"prompt": "sea " * 600})
    dataset.write_text('{"prompt": "short"}\n' + too_long)
    report = measure(ServingSettings(server.url, dataset, output_len=4, api_key=KEY))
    assert (report.summary.completed, report.summary.failed) == (1, 1)
    assert "HTTP 400" in report.requests[1].error


def test_a_server_that_cannot_be_measured_is_said_so(server: ServerProcess, dataset: Path) -> None:
    for key, model in (("wrong", None), (None, None), (None, "m")):
        with pytest.raises(BenchFailed, match=r"401: the server asks for a key.*--api-key") as no:
            measure(ServingSettings(server.url, dataset, model=model, output_len=4, api_key=key))
        assert "\n" not in str(no.value)
    with pytest.raises(BenchFailed, match="warm-up"):
        measure(ServingSettings(server.url, dataset, model="m", output_len=4, api_key=KEY))


def test_times_are_summed_up_by_their_definitions() -> None:
    results = [
        Timed("a", ttft=1.0, e2e=3.0, gaps=[1.0, 1.0], prompt_tokens=5, output_tokens=5),
        Timed("b", ttft=2.0, e2e=2.0, prompt_tokens=5, output_tokens=1, verifications=2, kept=5),
        Timed("c", error="HTTP 500"),
    ]
    found = summarise(results, 4.0)
    assert (found.completed, found.failed) == (2, 1)
    assert found.tpot.mean == found.tpot.p99 == 500
    assert found.itl.mean == 1000
    assert found.ttft.mean == 1500
    assert (found.output_throughput, found.total_throughput) == (1.5, 4.0)
    assert found.accept_length == 2.5
