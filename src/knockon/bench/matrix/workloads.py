"""Workloads: files of prompts, named as columns and rows name them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from knockon.bench.serving.dataset import read_dataset
from knockon.bench.workload_files import order_of, refuse_repeated, title_of, workload_files
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


def find_workloads(paths: Sequence[Path]) -> tuple[ServedWorkload, ...]:
    """Read workloads, in the order of the published tables, others after them.

    Args:
        paths: files in any form that ``knockon bench serving`` takes, or folders of ``*.jsonl``.

    Raises:
        Refused: none, a folder without files, a file without prompts, two of the same name, or a
            name that cannot be part of a file's.
    """
    files = workload_files(paths, "a file of prompts or a folder of them")
    if not files:
        raise Refused("workloads", None, "files of prompts, or a folder of them")
    found = []
    for file in files:
        if not _NAME.fullmatch(file.stem):
            raise Refused("workloads", str(file), "a name of letters, digits, '.', '_' and '-'")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        found.append(ServedWorkload(file.stem, file, len(read_dataset(file)), digest))
    refuse_repeated([workload.name for workload in found])
    return tuple(sorted(found, key=lambda workload: order_of(workload.name)))
