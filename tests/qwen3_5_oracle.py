"""transformers' Qwen3.5 in PyTorch, whatever else is installed.

Where flash-linear-attention can be imported, transformers takes its kernels on any device, CPUs
included, and decides so when the model's code is imported: which is here, with that hidden.
"""

from __future__ import annotations

import sys

_hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("fla.")}
_hidden |= {"fla": sys.modules.pop("fla")} if "fla" in sys.modules else {}
sys.modules["fla"] = None  # type: ignore[assignment]  # an import of it fails
try:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
finally:
    del sys.modules["fla"]
    sys.modules.update(_hidden)

__all__ = ["Qwen3_5ForCausalLM"]
