"""What this machine offers, as plain data: the facts that defaults are chosen from."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

# Instruction sets that change which precision is fast on a CPU, by their names in /proc/cpuinfo.
_TELLING_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "i8mm",
    "bf16",
)


@dataclass(frozen=True)
class GPU:
    """One CUDA device; memory in bytes, capability as (major, minor)."""

    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Hardware:
    """This machine: memory in bytes, ``cores`` as many as this process may use."""

    cpu: str
    cores: int
    cpu_flags: tuple[str, ...]
    memory: int
    memory_available: int
    gpus: tuple[GPU, ...]


def detect() -> Hardware:
    """Reads the machine; on systems without ``/proc`` the CPU's name and flags stay coarse."""
    cpu, flags = _cpu()
    total, available = _memory()
    return Hardware(cpu, _cores(), flags, total, available, _gpus())


def available_memory(device: torch.device) -> int:
    """Bytes that this process may still take there."""
    if device.type != "cuda":
        return _memory()[1]
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> tuple[str, tuple[str, ...]]:
    facts = _fields(Path("/proc/cpuinfo"))
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    name = facts.get("model name") or platform.processor() or platform.machine()
    return name, tuple(flag for flag in _TELLING_FLAGS if flag in flags)


def _memory() -> tuple[int, int]:
    facts = _fields(Path("/proc/meminfo"))
    if "MemTotal" in facts:
        total, available = (
            int(facts[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable")
        )
        return total, available
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, total


def _fields(path: Path) -> dict[str, str]:
    """``key: value`` lines of a /proc file, the first of each key; empty where there is no file."""
    fields: dict[str, str] = {}
    if path.is_file():
        for line in path.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    return fields


def _gpus() -> tuple[GPU, ...]:
    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        found.append(GPU(properties.name, properties.total_memory, capability))
    return tuple(found)
