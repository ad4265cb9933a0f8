"""A result file is whole or as it was before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from knockon.bench.whole_file import write_whole


def test_a_write_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "result.json"
    write_whole(file, "before")

    def full(number: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_whole(file, "after")
    assert file.read_text() == "before"


def test_a_link_stays_one_and_its_file_is_written(tmp_path: Path) -> None:
    link = tmp_path / "latest.json"
    link.symlink_to("result.json")
    write_whole(link, "é")
    assert link.is_symlink() and (tmp_path / "result.json").read_text("utf-8") == "é"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "result.json"]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "text")
        assert os.read(reader, 16) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
