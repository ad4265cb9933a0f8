"""A result file that is whole or as it was before, whenever its writer is ended."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Write beside a file's place, then put it there at once.

    What is no file (a pipe, a terminal) is written to as it is; a link stays one.

    Raises:
        OSError: it cannot be written.
    """
    place = file.resolve()
    if place.exists() and not place.is_file():
        place.write_text(text, "utf-8")
        return
    beside = place.with_name(f".{place.name}.tmp")
    with beside.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    os.replace(beside, place)
