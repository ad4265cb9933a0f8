"""Weights of a GGUF file under Hugging Face's names and layout, dequantised on reading."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from torch import Tensor

from knockon.errors import Refused
from knockon.models.gguf_config import ROPE_DIVISORS, parse_gguf
from knockon.models.gguf_header import GGUFTensor, read_header

_CHUNK_VALUES = 1 << 18  # dequantised at a time: 1 MiB of FP32 stays in cache

_OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GGUFFile:
    """Tensors of a GGUF file.

    Args:
        path: the file.
        dtype: what :meth:`get` returns; each chunk is dequantised to FP32 and rounded once.

    Raises:
        Refused: as :func:`read_header` and :func:`parse_gguf`; a type that cannot be dequantised.
    """

    def __init__(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        self.path = Path(path)
        self.dtype = dtype
        self.header = read_header(self.path)
        self.config = parse_gguf(self.header)
        self._tensors = {
            hugging_face_name(name): tensor
            for name, tensor in self.header.tensors.items()
            if name != ROPE_DIVISORS
        }
        for tensor in {tensor.kind: tensor for tensor in self._tensors.values()}.values():
            _check_readable(self.path, tensor)

    def names(self) -> set[str]:
        """Every tensor's Hugging Face name; one without a translation keeps its own."""
        return set(self._tensors)

    def get(self, name: str) -> Tensor:
        """The full tensor in ``dtype``, on the CPU."""
        tensor = self._tensors[name]
        values = self._dequantised(tensor)
        heads = self._interleaved_heads(tensor.name)
        if heads is None:
            return values
        if values.shape[0] % (2 * heads):
            raise Refused(
                f"{self.path}: rows of {tensor.name}", values.shape[0], f"pairs in {heads} heads"
            )
        return deinterleave(values, heads)

    def describe(self) -> str:
        """What this is, for messages."""
        return f"{self.path} (GGUF)"

    def _dequantised(self, tensor: GGUFTensor) -> Tensor:
        block, size = GGML_QUANT_SIZES[tensor.kind]
        data = self.header.data[tensor.offset : tensor.offset + tensor.num_bytes]
        out = torch.empty(tensor.shape, dtype=self.dtype)
        flat = out.view(-1)
        step = max(_CHUNK_VALUES // block, 1)
        for first in range(0, tensor.num_bytes // size, step):
            # One row of many blocks: the package dequantises it in one sweep.
            chunk = np.array(data[first * size : (first + step) * size]).reshape(1, -1)
            values = torch.from_numpy(dequantize(chunk, tensor.kind).reshape(-1))
            flat[first * block : first * block + values.numel()] = values
        return out

    def _interleaved_heads(self, name: str) -> int | None:
        """Heads of a projection whose rows are stored in the order of interleaved rotary pairs."""
        if self.config.architecture != "llama":
            return None
        if ".attn_q." in name:
            return self.config.num_heads
        return self.config.num_kv_heads if ".attn_k." in name else None


def hugging_face_name(name: str) -> str:
    """Translate a GGUF tensor name; one that has no translation is returned as it is."""
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        return name
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


def deinterleave(rows: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's reordering of Llama query and key rows.

    It stores each head's rows as rotary pairs ``(0, D/2, 1, D/2 + 1, …)``; rotate-half wants the
    first members of all pairs, then the second.
    """
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


def _check_readable(path: Path, tensor: GGUFTensor) -> None:
    _, size = GGML_QUANT_SIZES[tensor.kind]
    try:
        dequantize(np.zeros((1, size), dtype=np.uint8), tensor.kind)
    except NotImplementedError:
        raise Refused(
            f"{path}: type of {tensor.name}", tensor.kind.name, "a type that gguf dequantises"
        ) from None
