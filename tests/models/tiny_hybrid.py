"""Tiny random hybrid targets: transformers' model as the oracle, and ours as the engine runs it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from knockon.layers.attention import plan_block
from knockon.layers.recurrent_state import DeltaMemory, StateRows
from knockon.models.decoder import Decoder
from knockon.models.decoder_layer import LayerMemory
from tests.qwen3_5_oracle import Qwen3_5ForCausalLM

PAGE_SIZE = 4
SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
CASES: dict[str, dict[str, Any]] = {
    "three of four layers recurrent": {},
    "tied, one value head a key head": {"tie_word_embeddings": True, "linear_num_value_heads": 4},
    "first layer attends, biases": {
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "num_hidden_layers": 3,
        "attention_bias": True,
    },
    "few heads, long convolution": {
        "num_key_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_conv_kernel_dim": 6,
    },
}


def make_reference(settings: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A transformers model with random weights, norms, decays and biases included."""
    torch.manual_seed(seed)
    model: PreTrainedModel = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**(SIZES | settings)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-3, 1.5)
            elif name.endswith(("norm.weight", "bias")):
                parameter.normal_(float("linear_attn.norm" in name), 0.2)
            else:
                scale = 1.0 if "embed" in name else 0.7 * parameter.shape[-1] ** -0.5
                parameter.normal_(0, scale)
    return model.eval()


def save_with_images(model: PreTrainedModel, folder: Path) -> Path:
    """The same weights as published with a part that reads images: nested names and settings."""
    model.save_pretrained(folder)
    text = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): w for name, w in weights.items()}
    renamed["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(3, 3)
    renamed["mtp.fc.weight"] = torch.zeros(3, 3)
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    nested = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text | {"architectures": None, "model_type": "qwen3_5_text"},
        "vision_config": {"depth": 1},
        "image_token_id": 99,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
    (folder / "config.json").write_text(json.dumps(nested))
    return folder


class Run(NamedTuple):
    """What a run of several forwards gave."""

    logits: Tensor
    hidden: Tensor
    features: Tensor


class Runner:
    """Runs requests as the engine does: pages, slots of states, blocks that are taken back."""

    def __init__(
        self,
        model: Decoder,
        batch: int,
        positions: int = 128,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        pages = -(-positions // PAGE_SIZE)
        self.table = torch.arange(1, batch * pages + 1).view(pages, batch).T.contiguous()
        self.slots = torch.arange(batch).flip(0) + 1
        self.memory: list[LayerMemory] = model.allocate(
            (batch * pages + 1) * PAGE_SIZE, batch + 2, state_dtype
        )

    def run(
        self, ids: Tensor, starts: Tensor, layers: tuple[int, ...] = (), held: bool = False
    ) -> Run:
        """Rows ``ids [B, T]`` from ``starts [B]`` on."""
        rows = ids.shape[1]
        states = StateRows(self.slots[: len(ids)], held, bool((starts == 0).any()))
        context = int(starts.max()) + rows
        plan = plan_block(self.table[: len(ids)], PAGE_SIZE, starts, rows, context, states=states)
        out = self.model(ids, plan, self.memory, layers)
        features = out.features if out.features is not None else out.hidden[..., :0]
        return Run(self.model.logits(out.hidden), out.hidden, features)

    def commit(self, lengths: Tensor) -> None:
        """Let the first ``lengths [B]`` rows of the block just run stand."""
        for memory in self.memory:
            if isinstance(memory, DeltaMemory):
                memory.commit(lengths)

    def chunks(self, ids: Tensor, counts: Sequence[int], layers: tuple[int, ...] = ()) -> Run:
        """``ids [B, T]`` from position 0 on, in forwards of so many rows."""
        runs, start = [], 0
        for count in counts:
            starts = torch.full((len(ids),), start)
            runs.append(self.run(ids[:, start : start + count], starts, layers))
            start += count
        return Run(*(torch.cat(parts, 1) for parts in zip(*runs, strict=True)))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """max |difference| over max |expected|."""
    return float((found - expected).abs().max() / expected.abs().max())
