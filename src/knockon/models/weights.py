"""Where weights come from: one interface over safetensors folders and GGUF files."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class WeightSource(Protocol):
    """Full checkpoint tensors by their Hugging Face names, read when asked for."""

    def names(self) -> set[str]:
        """Every tensor's name, as the checkpoint spells it."""
        ...

    def get(self, name: str) -> Tensor:
        """The full tensor, on the CPU."""
        ...

    def describe(self) -> str:
        """What this is, for messages."""
        ...
