"""Reports of canned results: the published arithmetic, nothing hidden, nothing fetched."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from knockon.bench.matrix.cells import Cell
from knockon.bench.matrix.folder import FAILED, ResultsFolder
from knockon.bench.matrix.report.blocks import Entry, Table, Text
from knockon.bench.matrix.report.facts import machine
from knockon.bench.matrix.report.html import to_html
from knockon.bench.matrix.report.markdown import to_markdown
from knockon.bench.matrix.report.results import Results
from knockon.bench.matrix.report.sections import sections
from knockon.bench.matrix.report.tables import (
    accept_table,
    equal_table,
    macro_table,
    throughput_table,
)
from knockon.cli.app import app
from knockon.errors import Refused
from tests.bench.matrix.canned import CPU, write_canned
from tests.bench.matrix.published import MACRO, METHODS, THROUGHPUT

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ResultsFolder:
    return write_canned(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole: ResultsFolder, tmp_path: Path) -> ResultsFolder:
    return ResultsFolder(shutil.copytree(whole.path, tmp_path / "results"))


def row(table: Table, name: str) -> list[Entry]:
    return next(list(each[1:]) for each in table.rows if each[0].text == name)


def forget(folder: ResultsFolder, *methods: str) -> None:
    for method in methods:
        for file in (folder.path / "cells").glob(f"*-{method}.json"):
            file.unlink()


def test_published_throughputs_give_the_published_macro_speed_ups(whole: ResultsFolder) -> None:
    results = Results(whole)
    for name, published in MACRO.items():
        concurrencies = results.concurrencies if name == "Overall" else [int(name)]
        for method, value in zip(results.drafted, published, strict=True):
            found = results.macro(method.name, concurrencies)
            # Both are of rounded numbers: MTP-S3's overall mean, 2.2251, was published as 2.22.
            assert found is not None and found.complete
            assert found.mean == pytest.approx(value, abs=0.0055)
    table = macro_table(results)
    assert [entry.text for entry in row(table, "1")][-2:] == ["3.94x", "4.54x"]
    assert [e.text for e in row(table, "Overall") if e.bold] == ["3.00x"]


def test_an_entry_has_mean_spread_and_speed_up_and_the_fastest_is_bold(
    whole: ResultsFolder,
) -> None:
    results = Results(whole)
    first = row(throughput_table(results, 1), "GSM8K")
    assert first[0] == Entry("47.2 ± 0.9", aside="1.00x")
    assert first[-1] == Entry("248.0 ± 5.0", True, "5.25x")
    assert sum(entry.bold for entry in first) == 1
    assert row(throughput_table(results, 32), "MT-Bench")[1].bold  # MTP-S3
    for concurrency, workloads in THROUGHPUT.items():
        for workload, speeds in workloads.items():
            best = results.throughput(
                METHODS[1 + speeds[1:].index(max(speeds[1:]))], workload, concurrency
            )
            assert best is not None and best.mean == pytest.approx(max(speeds[1:]))


def test_accept_lengths_are_bold_within_groups_of_the_same_most(whole: ResultsFolder) -> None:
    found = row(accept_table(Results(whole), 1), "GSM8K")
    assert [entry.text.split(" ")[0] for entry in found if entry.bold] == ["6.335", "9.163"]
    # MTP-S7 may reach 8, as b8 may; MTP-S3 has no peer.
    assert [entry.bold for entry in found] == [False, False, False, False, False, True, True]


def test_a_default_width_is_grouped_by_what_the_server_told(folder: ResultsFolder) -> None:
    settings = folder.settings()
    settings["methods"] = ["target", "domino", "dflash-b16"]
    for cell in list(Results(folder).done):
        if cell.method == "domino-b16":
            record = folder.record(cell) | {"cell": vars(cell) | {"method": "domino"}}
            folder.write(Cell(**record["cell"]), record)
    from knockon.bench.matrix.folder import SETTINGS, write_json

    write_json(folder.path / SETTINGS, settings)
    results = Results(folder)
    assert results.most(results.methods[1]) == 16
    assert [entry.bold for entry in row(accept_table(results, 1), "GSM8K")] == [True, False]


def test_equal_answers_are_counted_by_method_and_by_targets_own_repeats(
    whole: ResultsFolder,
) -> None:
    table = equal_table(Results(whole), 8)
    assert table.columns[1] == "target-only again"
    found = dict(zip(METHODS, (e.text for e in row(table, "MBPP")), strict=True))
    assert found["target"] == "8 of 8"  # repeats 2 and 3 against 1
    assert found["domino-b8"] == found["mtp-s7"] == "12 of 12"
    assert found["domino-b16"] == found["mtp-s15"] == "9 of 12"


def test_what_is_missing_or_failed_is_shown_as_such(folder: ResultsFolder) -> None:
    forget(folder, "mtp-s15")
    lost = Cell(2, "gsm8k", 8, "domino-b8")
    failed = folder.record(lost) | {"status": FAILED, "error": "the server | went away", "log": []}
    folder.write(lost, failed)
    for repeat in (1, 2, 3):
        cell = Cell(repeat, "alpaca", 32, "dflash-b8")
        folder.write(cell, folder.record(cell) | {"status": FAILED, "error": "no", "log": []})
    (folder.path / "cells" / "r3-mbpp-c1-target.json").unlink()
    results = Results(folder)
    entries = dict(zip(METHODS, row(throughput_table(results, 8), "GSM8K"), strict=True))
    assert entries["mtp-s15"].text == "–"
    assert entries["domino-b8"].text == "1141.7 ± 11.5 [2 of 3]"
    assert row(throughput_table(results, 32), "Alpaca")[4].text == "failed"
    macro = row(macro_table(results), "32")
    assert macro[2].text == "–"
    assert macro[3].text.endswith("x (5 of 6)") and not macro[3].bold
    text = to_markdown(sections(results))
    assert "55 cells are not measured, 4 failed" in text
    assert "r2-gsm8k-c8-domino-b8: the server \\| went away" in text
    assert "and 35 more" in text


def test_without_a_target_there_are_speeds_and_no_ratios(folder: ResultsFolder) -> None:
    forget(folder, "target")
    results = Results(folder)
    assert row(throughput_table(results, 1), "GSM8K")[-1] == Entry("248.0 ± 5.0", True)
    assert row(equal_table(results, 1), "GSM8K")[-1].text == "–"
    to_markdown(sections(results))


def test_an_empty_matrix_has_a_report_too(folder: ResultsFolder, tmp_path: Path) -> None:
    forget(folder, *METHODS)
    done = CliRunner().invoke(app, ["bench", "report", str(folder.path), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "432 cells are not measured" in done.output


def test_a_cpu_is_named_before_any_number(tmp_path: Path) -> None:
    folder = write_canned(tmp_path / "results", device="cpu")
    blocks = sections(Results(folder))
    loud = next(block for block in blocks if isinstance(block, Text))
    assert loud.loud and "CPU" in loud.text
    assert "CPU (Some CPU, 2 cores, torch threads: 2)" in to_markdown(blocks).splitlines()[0]


def test_cells_of_two_machines_are_not_passed_off_as_one(folder: ResultsFolder) -> None:
    cell = Cell(1, "gsm8k", 1, "target")
    record = folder.record(cell)
    record["server"]["environment"] = CPU
    record["server"]["engine"]["device"] = "cpu"
    folder.write(cell, record)
    text = to_markdown(sections(Results(folder)))
    assert "several machines: 431 cells on 2 x A100, 1 cells on CPU" in text
    assert "Measured on a CPU" not in text


def test_a_server_that_told_nothing_is_said_so(folder: ResultsFolder) -> None:
    assert "did not tell" in machine(None) and "did not tell" in machine({"version": "1"})
    for cell, record in Results(folder).done.items():
        if cell.method in ("domino-b16", "target"):
            folder.write(cell, record | {"server": None})
    text = to_markdown(sections(Results(folder)))
    assert "108 cells on a machine that its server did not tell of" in text


class Page(HTMLParser):
    """What a page would fetch, and whether its tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.open: list[str] = []
        self.tables = self.images = self.bold = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action", "poster"):
                self.asked.append(value or "")
        self.images += tag == "img"
        self.tables += tag == "table"
        self.bold += tag == "b"
        if tag not in ("meta", "img", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_command_writes_a_page_that_fetches_nothing(
    whole: ResultsFolder, tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, ["bench", "report", str(whole.path), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    markdown = (tmp_path / "report.md").read_text()
    assert done.stdout == markdown
    assert "| GSM8K | 47.2 ± 0.9 (1.00x) |" in markdown
    assert "**248.0 ± 5.0 (5.25x)**" in markdown
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", markdown)
    assert pictures == ["throughput.png", "macro.png", "accept_length.png"]
    for name in pictures:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    page = Page()
    text = (tmp_path / "report.html").read_text()
    page.feed(text)
    assert not page.open
    assert page.images == 3 and page.tables == 3 * 4 + 2
    assert page.asked and all(each.startswith("data:image/png;base64,") for each in page.asked)
    assert not re.search(r"https?://|@import|url\(|<script|<link", text)
    # The bold entries are the same ones: a winner a row.
    assert page.bold == sum(
        entry.bold
        for block in sections(Results(whole))
        if isinstance(block, Table)
        for each in block.rows
        for entry in each
    )


def test_text_is_escaped_in_both_forms(tmp_path: Path) -> None:
    from knockon.bench.matrix.report.blocks import Heading

    blocks = [Heading(1, "<script>alert(1)</script> | a_b*c"), Text("& <img src=x>", loud=True)]
    assert "<script" not in to_html(blocks, tmp_path) and "<img" not in to_html(blocks, tmp_path)
    assert to_markdown(blocks).splitlines()[0] == r"# \<script\>alert(1)\</script\> \| a\_b\*c"


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_folder_that_holds_no_matrix_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "settings.json").write_text(content)
    done = CliRunner().invoke(app, ["bench", "report", str(tmp_path)])
    assert isinstance(done.exception, Refused) and "results" in str(done.exception)
