"""The results folder: settings, and one file a finished cell."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from knockon.bench.matrix.cells import WHOLE, Cell, Share
from knockon.bench.matrix.settings import MatrixSettings, merge
from knockon.bench.whole_file import write_whole
from knockon.errors import Refused

DONE, FAILED = "done", "failed"
SETTINGS, CELLS, LOCKS = "settings.json", "cells", ".locks"


class ResultsFolder:
    """Reads and writes the files of one matrix.

    Each is written beside its place and then moved there, so that it is whole or not there at all.

    Args:
        path: made by :meth:`open`, where it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, share: Share, place: int) -> Path:
        """Where the output of the server at a place of the present batch goes."""
        part = f".share-{share.index}" if share.count > 1 else ""
        return self.path / f"server{part}{f'.{place}' if place else ''}.log"

    def _log_lock(self, share: Share) -> Path:
        """Held by the run that writes a share's logs: a server's address is read from its log."""
        return self.path / LOCKS / self.log(share, 0).name

    @contextlib.contextmanager
    def open(
        self, settings: MatrixSettings, cells: Sequence[Cell], share: Share = WHOLE
    ) -> Iterator[None]:
        """Hold the folder for a run that measures these cells with these settings.

        Runs of different shares, which have no workload at a concurrency in common, may hold it
        side by side.

        Raises:
            Refused: one that cannot be written, whose cells another run is measuring, or were
                measured with other settings.
        """
        with contextlib.ExitStack() as held:
            try:
                (self.path / CELLS).mkdir(parents=True, exist_ok=True)
                (self.path / LOCKS).mkdir(exist_ok=True)
                held.enter_context(_locked(self._log_lock(share), fcntl.LOCK_NB))
                for group in dict.fromkeys(cell.group for cell in cells):
                    held.enter_context(_locked(self.path / LOCKS / group, fcntl.LOCK_NB))
                with _locked(self.path / LOCKS / SETTINGS):
                    write_json(self.path / SETTINGS, self.merged(settings))
            except BlockingIOError:
                wanted = "a folder that no other run is writing these cells in"
                raise Refused("--out", str(self.path), wanted) from None
            except OSError as error:
                raise Refused("--out", str(self.path), f"a folder to write in ({error})") from None
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


@contextlib.contextmanager
def _locked(file: Path, more: int = 0) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | more)
        yield


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
    write_whole(file, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
