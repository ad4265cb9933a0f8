"""Knockon: Domino speculative decoding, tensor-parallel, with the target's own tokens."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from knockon.engine.llm import LLM
    from knockon.engine.request import RequestOutput
    from knockon.engine.sampling_params import SamplingParams

__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "knockon.engine.llm",
    "RequestOutput": "knockon.engine.request",
    "SamplingParams": "knockon.engine.sampling_params",
}


def __getattr__(name: str) -> object:
    """Import the public names when they are first used: torch takes seconds to load."""
    if name not in _HOMES:
        raise AttributeError(f"module 'knockon' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
