"""Runs on tiny checkpoints: what is counted, that they repeat, that texts are the target's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from knockon.bench.acceptance.methods import Checkpoints, choose_methods
from knockon.bench.acceptance.report import AcceptanceReport, AcceptanceSettings
from knockon.bench.acceptance.run import measure
from knockon.bench.acceptance.workloads import load_workloads
from knockon.bench.workload_files import TITLES
from knockon.cli.app import app
from knockon.errors import Refused
from tests.engine.generation import TinyShelf
from tests.tiny_models import TinyMTP

WIDTHS = {"target": 1, "mtp-s3": 4, "dflash-b8": 8, "domino-b16": 16}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> TinyShelf:
    return TinyShelf(tmp_path_factory.mktemp("tiny"))


def checkpoints(shelf: TinyShelf) -> Checkpoints:
    kinds = ("mtp", "dflash", "domino")
    return Checkpoints(*(str(shelf.drafter(kind)) for kind in kinds))


def run(shelf: TinyShelf, names: str, **settings: object) -> AcceptanceReport:
    model = shelf.target()
    chosen = choose_methods(model, checkpoints(shelf), names.split(","))
    asked = {"max_tokens": 20, "device": "cpu", "dtype": "float32"} | settings
    return measure(
        AcceptanceSettings(str(model), **asked),  # type: ignore[arg-type]
        chosen,
        load_workloads([], 2)[:2],
    )


def test_every_cell_counts_what_was_kept_and_repeats(shelf: TinyShelf) -> None:
    names = ",".join(WIDTHS)
    first = run(shelf, names)
    assert set(first.cells) == {(n, w) for n in WIDTHS for w in ("gsm8k", "math500")}
    for (name, _), cell in first.cells.items():
        assert cell.same == cell.prompts == 2
        assert cell.kept == cell.tokens - cell.prompts
        assert 1 <= cell.accept_length <= WIDTHS[name]
    again = run(shelf, names, concurrency=2)
    assert {k: (c.kept, c.verifications) for k, c in first.cells.items()} == {
        k: (c.kept, c.verifications) for k, c in again.cells.items()
    }


def test_sampled_runs_repeat_by_their_seed(shelf: TinyShelf) -> None:
    one, two, other = (
        run(shelf, "target,domino-b8", temperature=1.2, seed=seed) for seed in (1, 1, 2)
    )

    def counts(report: AcceptanceReport) -> list[tuple[int, int, int | None]]:
        return [(c.kept, c.verifications, c.same) for c in report.cells.values()]

    assert counts(one) == counts(two) != counts(other)
    assert all(cell.same == cell.prompts for cell in one.cells.values())


def test_means_weigh_workloads_alike(shelf: TinyShelf) -> None:
    report = run(shelf, "target,domino-b8")
    method = report.methods[1]
    cells = [report.cells[method.name, w.name] for w in report.workloads]
    wanted = sum(cell.accept_length for cell in cells) / 2
    assert report.mean(method, lambda cell: cell.accept_length) == wanted
    assert report.to_json()["methods"][1]["mean_accept_length"] == wanted


def test_the_command_writes_tables_json_and_a_plot(shelf: TinyShelf, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("gsm8k", "zoo"):
        lines = [json.dumps({"id": str(i), "turns": [f"say {i}", "more"]}) for i in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    arguments = ["bench", "acceptance", str(shelf.target()), "--device", "cpu"]
    arguments += ["--domino", str(shelf.drafter("domino")), "--mtp", str(shelf.drafter("mtp"))]
    arguments += ["--methods", "target,mtp-s3,domino-b8", "--workloads", str(tmp_path)]
    arguments += ["--limit", "1", "--max-tokens", "8", "--dtype", "float32"]
    arguments += ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    for text in ("Accept length", "MTP-S3", "Domino b8", "GSM8K", "zoo", "mean", "target's own"):
        assert text in result.output
    found = json.loads((tmp_path / "r.json").read_text())
    assert [method["title"] for method in found["methods"]] == [
        "target-only",
        "MTP-S3",
        "Domino b8",
    ]
    assert found["methods"][2]["workloads"]["zoo"]["prompts"] == 1
    assert (tmp_path / "r.png").stat().st_size > 5000


def test_methods_without_a_name_are_those_of_the_checkpoints(shelf: TinyShelf) -> None:
    chosen = choose_methods(shelf.target(), checkpoints(shelf), None)
    assert [method.title for method in chosen] == [
        "target-only",
        *("MTP-S3", "MTP-S7", "MTP-S15"),
        *("DFlash b8", "DFlash b16", "Domino b8", "Domino b16"),
    ]
    some = choose_methods(shelf.target(), Checkpoints(dflash=str(shelf.drafter("dflash"))), None)
    assert [method.name for method in some] == ["target", "dflash-b8", "dflash-b16"]


def test_a_targets_own_head_needs_no_path(shelf: TinyShelf, tmp_path: Path) -> None:
    both = TinyMTP(own=True).save(tmp_path / "both", shelf.target())
    (method,) = choose_methods(both, Checkpoints(mtp="own"), ["mtp-s7"])
    assert (method.draft, method.width) == (None, 8)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("target,eagle", "methods: found 'eagle'"),
        ("domino-b17", "block size 16"),
        ("domino-b1", "domino-b1"),
        ("target,target", "each method once"),
    ],
)
def test_methods_that_cannot_be_measured_are_refused(
    shelf: TinyShelf, names: str, message: str
) -> None:
    with pytest.raises(Refused, match=message):
        choose_methods(shelf.target(), checkpoints(shelf), names.split(","))


def test_a_checkpoint_of_another_kind_is_refused(shelf: TinyShelf) -> None:
    with pytest.raises(Refused, match=r"--dflash: found .*kind domino"):
        choose_methods(shelf.target(), Checkpoints(dflash=str(shelf.drafter("domino"))), None)
    with pytest.raises(Refused, match="--mtp, a checkpoint"):
        choose_methods(shelf.target(), Checkpoints(), ["mtp-s3"])


def test_samples_cover_the_six_workloads_in_their_order(tmp_path: Path) -> None:
    assert [workload.name for workload in load_workloads([], None)] == list(TITLES)
    (tmp_path / "bad.jsonl").write_text('{"turns": []}\n')
    with pytest.raises(Refused, match="line 1"):
        load_workloads([tmp_path], None)
    with pytest.raises(Refused, match="workloads"):
        load_workloads([tmp_path / "none"], None)
