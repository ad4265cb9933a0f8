"""A folder holds cells of one kind: what may grow grows, what differs is refused by its name."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from knockon.bench.matrix.cells import Cell, Share, parse_share, plan
from knockon.bench.matrix.estimate import Estimate, duration
from knockon.bench.matrix.folder import DONE, FAILED, ResultsFolder
from knockon.bench.matrix.methods import parse_methods
from knockon.bench.matrix.run import to_measure
from knockon.bench.matrix.settings import MatrixSettings, parse_num_prompts
from knockon.bench.matrix.workloads import ServedWorkload, find_workloads
from knockon.errors import Refused

SEA = ServedWorkload("sea", Path("sea.jsonl"), 8, "aa")
LAND = ServedWorkload("land", Path("land.jsonl"), 20, "bb")


def settings(**changes: Any) -> MatrixSettings:
    given: dict[str, Any] = {
        "model": "m",
        "model_path": "/m",
        "drafters": {"domino": "/d"},
        "methods": parse_methods(["target", "domino-b8"]),
        "workloads": (SEA,),
        "concurrencies": (1, 4),
        "repeats": 2,
        "num_prompts": {1: 4, 4: None},
    }
    return MatrixSettings(**(given | changes))


def cells(asked: MatrixSettings) -> list[Cell]:
    return plan(asked.methods, asked.workloads, asked.concurrencies, asked.repeats)


def opened(folder: ResultsFolder, asked: MatrixSettings) -> AbstractContextManager[None]:
    return folder.open(asked, cells(asked))


def test_repeats_are_outermost_and_methods_innermost() -> None:
    names = [cell.name for cell in cells(settings(workloads=(SEA, LAND)))]
    assert len(names) == len(set(names)) == 16
    assert names[:3] == ["r1-sea-c1-target", "r1-sea-c1-domino-b8", "r1-sea-c4-target"]
    assert [name[:2] for name in names] == ["r1"] * 8 + ["r2"] * 8


def test_prompts_of_a_cell_are_bounded_by_concurrency_and_by_the_workload() -> None:
    asked = settings(num_prompts=parse_num_prompts("4=16", (1, 4)))
    assert [asked.prompts_of(LAND, c) for c in (1, 4)] == [20, 16]
    assert [asked.prompts_of(SEA, c) for c in (1, 4)] == [8, 8]
    assert parse_num_prompts("3", (1, 4)) == {1: 3, 4: 3}
    assert parse_num_prompts(None, (1, 4)) == {1: None, 4: None}
    assert [settings(warmup_requests=w).warmups_at(4) for w in (None, 0, 2)] == [4, 0, 2]


@pytest.mark.parametrize("text", ["x", "1=", "2=8", "1=x", "", "=3"])
def test_other_counts_of_prompts_are_refused(text: str) -> None:
    with pytest.raises(Refused, match="num_prompts"):
        parse_num_prompts(text, (1, 4))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("concurrency", {"concurrencies": (0,), "num_prompts": {}}),
        ("concurrency", {"concurrencies": (2, 2), "num_prompts": {}}),
        ("repeats", {"repeats": 0}),
        ("output_len", {"output_len": 0}),
        ("num_prompts", {"num_prompts": {1: 0}}),
        ("warmup_requests", {"warmup_requests": -1}),
        ("request_rate", {"request_rate": 0.0}),
        ("temperature", {"temperature": float("nan")}),
        ("servers_ahead", {"servers_ahead": -1}),
        ("methods", {"methods": ()}),
    ],
)
def test_values_out_of_range_are_refused_by_field(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=f"^{field}: "):
        settings(**changes)


def test_a_folder_grows_along_its_axes(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path / "new" / "out")
    with opened(folder, settings()):
        pass
    more = settings(
        methods=parse_methods(["dflash-b8"]),
        drafters={"dflash": "/f"},
        workloads=(LAND,),
        concurrencies=(2,),
        repeats=1,
        num_prompts={2: 6},
    )
    with opened(folder, more):
        found = folder.settings()
    assert found["methods"] == ["target", "domino-b8", "dflash-b8"]
    assert list(found["workloads"]) == ["sea", "land"]
    assert (found["concurrencies"], found["repeats"]) == ([1, 2, 4], 2)
    assert found["num_prompts"] == {"1": 4, "4": None, "2": 6}
    assert found["drafters"] == {"domino": "/d", "dflash": "/f"}


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("model", {"model": "other"}),
        ("output_len", {"output_len": 64}),
        ("seed", {"seed": 2}),
        ("request_rate", {"request_rate": 2.0}),
        ("temperature", {"temperature": 0.5}),
        ("ignore_eos", {"ignore_eos": True}),
        ("chat", {"chat": False}),
        ("warmup_requests", {"warmup_requests": 3}),
        ("serve_arguments", {"serve_arguments": ("--tp-size", "2")}),
        ("drafters domino", {"drafters": {"domino": "/e"}}),
        ("num_prompts 1", {"num_prompts": {1: 5, 4: None}}),
        ("workload sea sha256", {"workloads": (dataclasses.replace(SEA, sha256="cc"),)}),
    ],
)
def test_what_cells_were_not_measured_with_is_refused_by_field(
    tmp_path: Path, field: str, changes: dict[str, Any]
) -> None:
    folder = ResultsFolder(tmp_path)
    with opened(folder, settings()):
        pass
    before = (tmp_path / "settings.json").read_text()
    with pytest.raises(Refused, match=f"^{field}: "), opened(folder, settings(**changes)):
        pass
    assert (tmp_path / "settings.json").read_text() == before
    with opened(folder, settings(start_timeout=1, request_timeout=2, save_texts=True)):
        pass


def test_one_run_at_a_time_writes_in_a_folder(tmp_path: Path) -> None:
    first, second = ResultsFolder(tmp_path), ResultsFolder(tmp_path)
    with (
        opened(first, settings()),
        pytest.raises(Refused, match="no other run"),
        opened(second, settings()),
    ):
        pass
    with opened(second, settings()):
        pass


def test_shares_are_a_partition_with_whole_groups_and_their_part_of_each_concurrency() -> None:
    workloads = tuple(ServedWorkload(n, Path(n), 8, "aa") for n in ("a", "b", "c", "d"))
    asked = settings(workloads=workloads, concurrencies=(1, 4, 8), num_prompts={})
    everything = cells(asked)
    for count in (1, 2, 3):
        shares = [Share(index, count).of(everything) for index in range(1, count + 1)]
        assert sorted(c.name for s in shares for c in s) == sorted(c.name for c in everything)
        groups = [{cell.group for cell in share} for share in shares]
        assert sum(map(len, groups)) == 12, "a group is split"
        for share in shares:
            assert share == [cell for cell in everything if cell in share]
            assert {cell.concurrency for cell in share} == {1, 4, 8}
    assert parse_share("2/3") == Share(2, 3)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/x", "", "-1/2", "1/2/3"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(Refused, match=r"^share: "):
        parse_share(text)


def test_shares_hold_one_folder_side_by_side_and_overlapping_runs_do_not(tmp_path: Path) -> None:
    asked = settings(workloads=(SEA, LAND))
    everything, folders = cells(asked), [ResultsFolder(tmp_path) for _ in range(3)]
    halves = [Share(index, 2) for index in (1, 2)]
    shares = [half.of(everything) for half in halves]
    with (
        folders[0].open(asked, shares[0], halves[0]),
        folders[1].open(asked, shares[1], halves[1]),
    ):
        third = Share(2, 3)
        # The last has no cell in common, but would read addresses from another run's logs.
        refused = ((shares[0], halves[0]), (everything, Share()), (third.of(everything), third))
        for overlapping, share in (*refused, ([], halves[0])):
            with (
                pytest.raises(Refused, match="no other run"),
                folders[2].open(asked, overlapping, share),
            ):
                pass
        for folder, share in zip(folders, shares, strict=False):
            for cell in share:
                folder.write(cell, {"status": DONE})
    assert not to_measure(everything, folders[2], False)


def test_the_number_of_servers_ahead_may_change_and_the_last_is_saved(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path)
    for ahead in (0, 3):
        with opened(folder, settings(servers_ahead=ahead)):
            assert folder.settings()["servers_ahead"] == ahead


def test_finished_cells_are_passed_over_and_failed_ones_only_tried_again_when_asked(
    tmp_path: Path,
) -> None:
    asked, folder = settings(), ResultsFolder(tmp_path)
    everything = cells(asked)
    with opened(folder, asked):
        folder.write(everything[0], {"status": DONE})
        folder.write(everything[2], {"status": FAILED})
    assert to_measure(everything, folder, False) == [everything[1], *everything[3:]]
    assert to_measure(everything, folder, True) == everything[1:]


def test_a_write_that_is_cut_short_leaves_what_was_there(tmp_path: Path) -> None:
    asked, folder = settings(), ResultsFolder(tmp_path)
    cell = cells(asked)[0]
    with opened(folder, asked):
        folder.write(cell, {"status": DONE})
        with pytest.raises(TypeError):
            folder.write(cell, {"status": FAILED, "error": object()})
        assert folder.status(cell) == DONE
        assert [record["status"] for record in folder.records()] == [DONE]


def test_workloads_are_named_by_their_files_in_the_published_order(tmp_path: Path) -> None:
    for name in ("zoo", "alpaca", "gsm8k"):
        (tmp_path / f"{name}.jsonl").write_text('{"turns": ["a"]}\n{"prompt": "b"}\n')
    single = tmp_path / "sharegpt.json"
    single.write_text('[{"conversations": [{"value": "q"}, {"value": "a"}]}]')
    found = find_workloads([tmp_path, single])
    assert [w.name for w in found] == ["gsm8k", "alpaca", "sharegpt", "zoo"]
    assert [w.title for w in found] == ["GSM8K", "Alpaca", "sharegpt", "zoo"]
    assert [w.prompts for w in found] == [2, 2, 1, 2]


@pytest.mark.parametrize("case", ["none", "empty", "missing", "twice", "odd name", "no prompts"])
def test_what_is_no_workload_is_refused(tmp_path: Path, case: str) -> None:
    file = tmp_path / ("a b.jsonl" if case == "odd name" else "a.jsonl")
    if case in ("twice", "odd name"):
        file.write_text('{"prompt": "p"}')
    if case == "no prompts":
        file.write_text("\n")
    given = {
        "none": [],
        "missing": [tmp_path / "b.jsonl"],
        "twice": [file, file],
    }.get(case, [tmp_path])
    with pytest.raises(Refused, match=r"workloads|dataset"):
        find_workloads(given)


def test_time_left_is_reckoned_from_the_most_alike_cells() -> None:
    estimate = Estimate()
    cell = Cell(2, "sea", 4, "target")
    assert estimate.of([cell]) is None and estimate.of([]) == 0
    estimate.add(Cell(1, "sea", 1, "domino-b8"), 100)
    assert estimate.of([cell]) == 100
    estimate.add(Cell(1, "land", 4, "domino-b8"), 50)
    assert estimate.of([cell]) == 50
    estimate.add(Cell(1, "land", 4, "target"), 30)
    assert estimate.of([cell]) == 30
    estimate.add(Cell(1, "sea", 4, "target"), 20)
    assert estimate.of([cell, cell]) == 40
    assert [duration(s) for s in (4.6, 65, 3900)] == ["5 s", "1 min 05 s", "1 h 05 min"]
