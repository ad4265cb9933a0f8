"""Files that a benchmark's result is written to: tried before the run, written after it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from knockon.bench.whole_file import write_whole
from knockon.errors import Refused


def check_result_files(as_json: Path | None, plot: Path | None) -> None:
    """Find out before a run whether its files can be written.

    Raises:
        Refused: one that cannot be, naming the option.
    """
    for option, path in (("json", as_json), ("plot", plot)):
        if path is not None:
            _check_writable(option, path)
    if plot is not None:
        from knockon.bench.rollout.plot import check_plot

        check_plot(plot)


def write_result(
    data: dict[str, Any],
    as_json: Path | None,
    plot: Path | None,
    draw: Callable[[Path], None],
) -> None:
    """Write what was asked for.

    Raises:
        Refused: a file that can no longer be written.
    """
    with _refusing():
        if as_json is not None:
            write_whole(as_json, json.dumps(data, indent=2, ensure_ascii=False) + "\n")
        if plot is not None:
            draw(plot)


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Refused(
            "result", str(error.filename), "a file that can be written", str(error)
        ) from error


def _check_writable(option: str, path: Path) -> None:
    there = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise Refused(option, str(path), "a file that can be written", str(error)) from error
    if not there:
        path.unlink()
