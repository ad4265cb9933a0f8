"""A results folder as a matrix would leave it, with the published numbers in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from knockon.bench.matrix.cells import Cell, plan
from knockon.bench.matrix.folder import DONE, ResultsFolder
from knockon.bench.matrix.methods import TARGET, ServedMethod, parse_methods
from knockon.bench.matrix.settings import MatrixSettings
from knockon.bench.matrix.workloads import ServedWorkload
from tests.bench.matrix.published import ACCEPT_LENGTH, METHODS, THROUGHPUT

REPEATS = 3
ANSWERS = 4
# Repeats lie so far from the published mean, which stays the mean.
OFF = (-0.02, 0.02, 0.0)
GPU = {"date": "2026-01-01", "versions": {"knockon": "0.1.0", "torch": "2.11.0"}, "gpus": ["A100"]}
CPU = GPU | {"gpus": [], "cpu": "Some CPU", "cores": 2, "torch_threads": 2}


def canned_settings() -> MatrixSettings:
    """Of the published matrix."""
    names = THROUGHPUT[1]
    return MatrixSettings(
        model="Qwen/Qwen3.6-27B",
        model_path="/models/qwen",
        drafters=dict.fromkeys(("mtp", "dflash", "domino"), "/models/draft"),
        methods=parse_methods(METHODS),
        workloads=tuple(ServedWorkload(name, Path(name), 128, "0" * 64) for name in names),
        concurrencies=tuple(THROUGHPUT),
        repeats=REPEATS,
        num_prompts=dict.fromkeys(THROUGHPUT, ANSWERS),
        output_len=4096,
    )


def canned_cells(settings: MatrixSettings) -> list[Cell]:
    """All of them."""
    return plan(settings.methods, settings.workloads, settings.concurrencies, settings.repeats)


def canned_record(cell: Cell, device: str = "cuda") -> dict[str, Any]:
    """What a cell would have left. Width 16 answers one prompt of each repeat otherwise."""
    column = METHODS.index(cell.method)
    speed = THROUGHPUT[cell.concurrency][cell.workload][column]
    accept = ACCEPT_LENGTH[cell.concurrency][cell.workload][column - 1] if column else None
    (method,) = parse_methods([cell.method])
    digests = [f"{cell.workload} {number}" for number in range(ANSWERS)]
    if method.width == 16:
        digests[0] = "another"
    return {
        "cell": vars(cell),
        "status": DONE,
        "began": "2026-01-01T00:00:00+00:00",
        "serve": ["--model-path", "/models/qwen", *method.serve_arguments("/models/draft")],
        "exit_code": 0,
        "start": {"listening": 1.0, "ready": 9.0, "graphs": 12, "capture": 3.5},
        "stop_seconds": 0.5,
        "summary": {
            "output_throughput": speed * (1 + OFF[cell.repeat - 1]),
            "accept_length": accept,
            "ttft": {"mean": 120.0},
            "tpot": {"mean": 1000 * cell.concurrency / speed},
        },
        "server": server_info(method, device),
        "requests": [{"name": str(i), "text_sha256": each} for i, each in enumerate(digests)],
        "seconds": 60.0,
    }


def server_info(method: ServedMethod, device: str) -> dict[str, Any]:
    """The parts of it that a report reads."""
    return {
        "version": "0.1.0",
        "engine": {"device": device, "dtype": "bfloat16", "tp_size": 2},
        "environment": GPU if device == "cuda" else CPU,
        "model_sizes": {
            "architecture": "qwen3",
            "num_layers": 64,
            "hidden_size": 5120,
            "num_heads": 24,
            "num_kv_heads": 4,
            "vocab_size": 248320,
        },
        "metrics": {"verify_width": 1 if method.kind == TARGET else method.width},
    }


def write_canned(path: Path, device: str = "cuda") -> ResultsFolder:
    """A whole matrix on disk."""
    settings, folder = canned_settings(), ResultsFolder(path)
    with folder.open(settings, canned_cells(settings)):
        for cell in canned_cells(settings):
            folder.write(cell, canned_record(cell, device))
    return folder
