"""What an engine runs on: versions and hardware, recorded beside every measurement."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from knockon import __version__
from knockon.engine.hardware import detect


def environment() -> dict[str, Any]:
    """Versions and hardware, as plain data for JSON."""
    hardware = detect()
    versions = {"knockon": __version__, "python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "fla-core"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": versions,
        "cpu": hardware.cpu,
        "cores": hardware.cores,
        "cpu_flags": list(hardware.cpu_flags),
        "torch_threads": torch.get_num_threads(),
        "gpus": [gpu.name for gpu in hardware.gpus],
    }
