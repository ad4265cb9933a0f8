"""Workloads: files of prompts, named as columns and rows name them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from knockon.bench.acceptance.workloads import TITLES
from knockon.bench.serving.dataset import read_dataset
from knockon.errors import Refused

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class ServedWorkload:
    """One file.

    Attributes:
        name: the file's, without its suffix.
        prompts: in it.
        sha256: of its bytes: the same name with other prompts is another workload.
    """

    name: str
    path: Path
    prompts: int
    sha256: str

    @property
    def title(self) -> str:
        """As tables write it."""
        return title_of(self.name)


def title_of(name: str) -> str:
    """How the published tables write a workload."""
    return TITLES.get(name, name)


def find_workloads(paths: Sequence[Path]) -> tuple[ServedWorkload, ...]:
    """Read workloads, in the order of the published tables, others after them.

    Args:
        paths: files in any form that ``knockon bench serving`` takes, or folders of ``*.jsonl``.

    Raises:
        Refused: none, a folder without files, a file without prompts, two of the same name, or a
            name that cannot be part of a file's.
    """
    files = [file for path in paths for file in _files(path)]
    if not files:
        raise Refused("workloads", None, "files of prompts, or a folder of them")
    found = []
    for file in files:
        if not _NAME.fullmatch(file.stem):
            raise Refused("workloads", str(file), "a name of letters, digits, '.', '_' and '-'")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        found.append(ServedWorkload(file.stem, file, len(read_dataset(file)), digest))
    names = [workload.name for workload in found]
    for name in names:
        if names.count(name) > 1:
            raise Refused("workloads", name, "each workload once")
    return tuple(sorted(found, key=lambda workload: order_of(workload.name)))


def order_of(name: str) -> tuple[int, str]:
    """Where a workload stands in tables."""
    return (list(TITLES).index(name) if name in TITLES else len(TITLES), name)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        if not files:
            raise Refused("workloads", str(path), "a folder with *.jsonl files")
        return files
    if not path.is_file():
        raise Refused("workloads", str(path), "a file of prompts or a folder of them")
    return [path]
