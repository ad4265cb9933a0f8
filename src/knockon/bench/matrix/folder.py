"""The results folder: settings, and one file a finished cell."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from knockon.bench.matrix.cells import Cell
from knockon.bench.matrix.settings import MatrixSettings, merge
from knockon.errors import Refused

DONE, FAILED = "done", "failed"
SETTINGS, CELLS, LOG, LOCK = "settings.json", "cells", "server.log", ".lock"


class ResultsFolder:
    """Reads and writes the files of one matrix.

    Each is written beside its place and then moved there, so that it is whole or not there at all.

    Args:
        path: made by :meth:`open`, where it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def log(self) -> Path:
        """Where the present server's output goes."""
        return self.path / LOG

    @contextlib.contextmanager
    def open(self, settings: MatrixSettings) -> Iterator[None]:
        """Hold the folder for a run with these settings.

        Raises:
            Refused: one that cannot be written, that another run holds, or whose cells were
                measured with other settings.
        """
        try:
            (self.path / CELLS).mkdir(parents=True, exist_ok=True)
            lock = (self.path / LOCK).open("w")
        except OSError as error:
            raise Refused("--out", str(self.path), f"a folder to write in ({error})") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                wanted = "a folder that no other run is writing in"
                raise Refused("--out", str(self.path), wanted) from None
            write_json(self.path / SETTINGS, self.merged(settings))
            yield

    def merged(self, settings: MatrixSettings) -> dict[str, Any]:
        """These settings and those of the cells that are here.

        Raises:
            Refused: by field, where they do not agree.
        """
        file = self.path / SETTINGS
        asked = settings.to_json()
        return merge(read_json(file), asked, str(file)) if file.is_file() else asked

    def settings(self) -> dict[str, Any]:
        """As saved.

        Raises:
            Refused: a folder that holds no matrix.
        """
        file = self.path / SETTINGS
        if not file.is_file():
            raise Refused("results", str(self.path), f"a folder of `bench matrix` with {SETTINGS}")
        return read_json(file)

    def status(self, cell: Cell) -> str | None:
        """``"done"``, ``"failed"``, or ``None`` for a cell that is still to be measured."""
        file = self.file_of(cell)
        return str(read_json(file)["status"]) if file.is_file() else None

    def record(self, cell: Cell) -> dict[str, Any]:
        """What was written of a cell."""
        return read_json(self.file_of(cell))

    def records(self) -> list[dict[str, Any]]:
        """Of every cell, by file name."""
        return [read_json(file) for file in sorted((self.path / CELLS).glob("*.json"))]

    def write(self, cell: Cell, record: dict[str, Any]) -> None:
        """Put down a cell's end, good or bad."""
        write_json(self.file_of(cell), record)

    def file_of(self, cell: Cell) -> Path:
        """Its name tells the cell."""
        return self.path / CELLS / f"{cell.name}.json"


def read_json(file: Path) -> dict[str, Any]:
    """An object from a file.

    Raises:
        Refused: a file that holds none.
    """
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise Refused("results", str(file), f"a file of JSON ({error})") from None
    if not isinstance(found, dict):
        raise Refused("results", str(file), "a JSON object")
    return found


def write_json(file: Path, data: dict[str, Any]) -> None:
    """Put a whole file in its place at once."""
    beside = file.with_name(f".{file.name}.tmp")
    with beside.open("w", encoding="utf-8") as out:
        json.dump(data, out, indent=1, ensure_ascii=False)
        out.write("\n")
        out.flush()
        os.fsync(out.fileno())
    os.replace(beside, file)
