"""Benchmarks of single kernels: held to their twins, timed, written with what they ran on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from knockon.bench.environment import environment
from knockon.bench.needs_gpu import needed_gpu
from knockon.bench.replay import replay_us
from knockon.bench.whole_file import write_whole

BYTES_PER_US = 4.1e6  # of reading and writing on an H200


def error_of(found: Tensor, wanted: Tensor, close: float, what: str) -> float:
    """Largest difference to the twin's over its largest number.

    Raises:
        SystemExit: it is not under ``close``.
    """
    difference = (found.float() - wanted.float()).abs().max()
    error = (difference / wanted.float().abs().max()).item()
    if not error < close:
        raise SystemExit(f"{what}: differs from the twin's by {error:.1e} of the largest")
    return error


def time_of(calls: Sequence[Callable[[], Any]], moved: int) -> dict[str, float]:
    """Microseconds of a call, and what reading and writing ``moved`` bytes alone would take."""
    return {"us": round(replay_us(calls), 2), "memory_us": round(moved / BYTES_PER_US, 2)}


def report_kernels(
    name: str,
    what: str | None,
    shape: dict[str, int],
    measure: Callable[[torch.device], Iterable[dict[str, Any]]],
) -> None:
    """The command of such a benchmark: a line for each result, and a file of all.

    Args:
        what: the command's description.
        measure: gives results on a GPU, one after the other.
    """
    parser = argparse.ArgumentParser(
        description=what, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="where results go")
    path = parser.parse_args().json
    device = needed_gpu()
    torch.manual_seed(0)
    results = []
    for result in measure(device):
        results.append(result)
        print("  ".join(f"{key} {value}" for key, value in result.items()), flush=True)
    report = {
        "benchmark": name,
        "shape": shape,
        "environment": environment(),
        "results": results,
    }
    write_whole(path, json.dumps(report, indent=1) + "\n")
