"""The prompts that are measured: files of the public sets, or a few samples of this project."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from knockon.bench.acceptance.samples import SAMPLES
from knockon.bench.workload_files import order_of, refuse_repeated, title_of, workload_files
from knockon.errors import Refused


@dataclass(frozen=True)
class Workload:
    """Prompts of one kind.

    Attributes:
        name: as the file is called.
        prompts: first turns.
        source: the file's name, or ``"samples"``.
    """

    name: str
    prompts: tuple[str, ...]
    source: str

    @property
    def title(self) -> str:
        """As tables write it."""
        return title_of(self.name)


def load_workloads(paths: Sequence[Path], limit: int | None) -> tuple[Workload, ...]:
    """Read workloads, in the order of the published tables.

    Args:
        paths: JSON-lines files of ``{"turns": [...]}``, or folders of them; none for the samples.
        limit: the first so many prompts of each.

    Raises:
        Refused: a path without such files, a line without turns, a workload twice.
    """
    if not paths:
        found = [Workload(name, texts, "samples") for name, texts in SAMPLES.items()]
    else:
        files = workload_files(paths, "a JSON-lines file or a folder of them")
        found = [Workload(file.stem, _read(file), file.name) for file in files]
    refuse_repeated([workload.name for workload in found])
    found.sort(key=lambda workload: order_of(workload.name))
    return tuple(Workload(w.name, w.prompts[:limit], w.source) for w in found)


def _read(file: Path) -> tuple[str, ...]:
    prompts = []
    # Not splitlines: a JSON string may hold U+2028 as it stands.
    for number, line in enumerate(file.read_text("utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            turns = json.loads(line)["turns"]
            first = turns[0]
        except (ValueError, KeyError, TypeError, IndexError):
            first = None
        if not isinstance(first, str) or not first.strip():
            raise Refused(f"{file}: line {number}", line[:60], '{"turns": [text, …]}')
        prompts.append(first)
    if not prompts:
        raise Refused(str(file), "no lines", "at least one prompt")
    return tuple(prompts)
