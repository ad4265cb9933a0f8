"""Tiny random targets and drafters as published checkpoints.

The weights are random with a structure laid under them, since purely random ones would never agree
and every accept length would be 1. The target tends to a fixed *successor* of its last token, and
its context often carries it elsewhere. The drafter attends to what is near and reads tokens out of
the context through the target's own head; its Domino head leans towards the successor.
Accept lengths then lie well between 1 and the verify width, and move with every state they hang on.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from tests.qwen3_5_oracle import Qwen3_5ForCausalLM
from tests.tiny_tokenizer import IM_END, MASK, VOCAB_SIZE, save_tokenizer

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 144, 9, 3, 16, 112, 4
POSITIONS = 512
RECURRENT: dict[str, Any] = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}


@dataclass(frozen=True)
class TinyTarget:
    """A target to be made.

    Attributes:
        family: ``"llama"``, ``"qwen3"`` or ``"qwen3_5"``, three of whose four layers are recurrent.
        permuted: the successor is a fixed other token; else the token itself.
        wander: how strongly the layers carry the next token away from the successor.
    """

    family: str = "llama"
    seed: int = 0
    permuted: bool = True
    tied: bool = False
    wander: float = 1.4
    max_positions: int = POSITIONS
    kv_heads: int = KV_HEADS

    def save(self, folder: Path) -> Path:
        """Write config, weights and tokenizer through ``transformers``."""
        sizes = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": self.kv_heads,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tied,
            "eos_token_id": IM_END,
            "bos_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }
        model: PreTrainedModel
        if self.family == "llama":
            model = LlamaForCausalLM(LlamaConfig(**sizes))
        elif self.family == "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**sizes))
        else:
            model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes | RECURRENT))
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self._weight(name, parameter.shape, generator))
            embedding = model.get_input_embeddings().weight
            # Unlike every other token, so that the drafter's attention can pass over masks.
            embedding[MASK] = -common_direction()
            if not self.tied:
                model.get_output_embeddings().weight.copy_(self._head(embedding))
        model.float().save_pretrained(folder)
        save_tokenizer(folder)
        return folder

    def _weight(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            zero_centred = self.family == "qwen3_5" and "linear_attn" not in name
            return (not zero_centred) + 0.1 * noise
        if name.endswith(("A_log", "dt_bias")):
            return noise - 1
        if "conv1d" in name:
            return noise * 0.5
        if "embed_tokens" in name:
            return noise + 0.5 * common_direction()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            return noise * 1.3 / shape[1] ** 0.5
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            return noise * self.wander / shape[1] ** 0.5
        return noise / shape[1] ** 0.5

    def _head(self, embedding: Tensor) -> Tensor:
        """Row ``successor(t)`` is the embedding of ``t``, without what all have in common."""
        along = common_direction() / HIDDEN**0.5
        rows = (embedding - torch.outer(embedding @ along, along)) / HIDDEN**0.5
        head = torch.empty_like(rows)
        head[self.successor()] = rows
        head[MASK] = 0
        return head * 2

    def successor(self) -> Tensor:
        """``[V]``: the token that each token leads to where its context does not interfere."""
        if not self.permuted:
            return torch.arange(VOCAB_SIZE)
        return torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(self.seed + 1))


def common_direction() -> Tensor:
    """``[H]``: a vector that every embedding holds, which attention can be anchored to."""
    signs = torch.randint(0, 2, (HIDDEN,), generator=torch.Generator().manual_seed(99))
    return signs * 2.0 - 1.0


@dataclass(frozen=True)
class TinyDrafter:
    """A drafter to be made for a tiny target.

    Attributes:
        domino: with a Domino head, or plain DFlash.
        layer_types: ``"f"`` for a full-attention layer, ``"s"`` for a sliding one.
        lean: how strongly the Domino head leans to the successor.
    """

    domino: bool = True
    shift_label: bool = False
    layer_types: str = "fsf"
    window: int = 12
    block_size: int = 16
    seed: int = 0
    prefix_len: int = 1
    target_layer_ids: tuple[int, ...] = (0, 2)
    gru: int = 64
    correction: int = 72
    lean: float = 4.0
    max_positions: int = POSITIONS
    rope_theta: float = 10000.0
    kv_heads: int = KV_HEADS

    def config(self) -> dict[str, Any]:
        """``config.json``."""
        names = {"f": "full_attention", "s": "sliding_attention"}
        dflash: dict[str, Any] = {
            "mask_token_id": MASK,
            "target_layer_ids": list(self.target_layer_ids),
        }
        if self.domino:
            dflash |= {
                "projector_type": "domino",
                "pure_draft_prefix_len": self.prefix_len,
                "gru_hidden_dim": self.gru,
                "emb_dim": self.correction,
                "shift_label": self.shift_label,
            }
        return {
            "architectures": ["DominoDraftModel" if self.domino else "DFlashDraftModel"],
            "model_type": "qwen3",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": len(self.layer_types),
            "num_attention_heads": HEADS,
            "num_key_value_heads": self.kv_heads,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "layer_types": [names[kind] for kind in self.layer_types],
            "sliding_window": self.window,
            "block_size": self.block_size,
            "num_target_layers": LAYERS,
            "dtype": "float32",
            "dflash_config": dflash,
        }

    def weights(self, target: Path) -> dict[str, Tensor]:
        """Every tensor of the published format, by its name."""
        generator = torch.Generator().manual_seed(1000 + self.seed)

        def noise(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=generator) * scale / shape[-1] ** 0.5

        def norm(size: int, mean: float = 1.0) -> Tensor:
            return mean + 0.1 * torch.randn(size, generator=generator)

        features = len(self.target_layer_ids)
        # Context keys are anchored less than the bonus token's, which so weighs as much as they do.
        along = common_direction() / HIDDEN**0.5
        fc = torch.eye(HIDDEN) - 0.8 * torch.outer(along, along)
        fc = fc.repeat(1, features) / features
        weights = {
            "fc.weight": fc + noise(HIDDEN, HIDDEN * features, scale=0.3),
            "hidden_norm.weight": norm(HIDDEN),
            "norm.weight": norm(HIDDEN, 0.5),
        }
        anchor = common_direction() / HIDDEN
        kv = self.kv_heads * HEAD_DIM
        for layer in range(len(self.layer_types)):
            basis = torch.linalg.qr(noise(HIDDEN, kv))[0].t()  # [kv * D, H], orthonormal rows
            near = torch.ones(HEAD_DIM, 1) @ anchor[None]
            per_head = basis.view(self.kv_heads, 1, HEAD_DIM, HIDDEN)
            out = per_head.expand(-1, HEADS // self.kv_heads, -1, -1).reshape(
                HEADS * HEAD_DIM, HIDDEN
            )
            within = {
                "input_layernorm.weight": norm(HIDDEN),
                "post_attention_layernorm.weight": norm(HIDDEN),
                "self_attn.q_proj.weight": -near.repeat(HEADS, 1)
                + noise(HEADS * HEAD_DIM, HIDDEN, scale=0.3),
                "self_attn.k_proj.weight": near.repeat(self.kv_heads, 1)
                + noise(kv, HIDDEN, scale=0.3),
                "self_attn.v_proj.weight": basis + noise(kv, HIDDEN, scale=0.2),
                "self_attn.o_proj.weight": out.t() + noise(HIDDEN, HEADS * HEAD_DIM, scale=0.2),
                "self_attn.q_norm.weight": norm(HEAD_DIM, 1.2),
                "self_attn.k_norm.weight": norm(HEAD_DIM, 1.2),
                "mlp.gate_proj.weight": noise(INNER, HIDDEN),
                "mlp.up_proj.weight": noise(INNER, HIDDEN),
                "mlp.down_proj.weight": noise(HIDDEN, INNER, scale=0.3),
            }
            weights |= {f"layers.{layer}.{name}": tensor for name, tensor in within.items()}
        if self.domino:
            weights |= self._head(target, generator)
        return {name: tensor.contiguous() for name, tensor in weights.items()}

    def _head(self, target: Path, generator: torch.Generator) -> dict[str, Tensor]:
        held = load_file(target / "model.safetensors")
        lm_head = held.get("lm_head.weight", held["model.embed_tokens.weight"])

        def noise(*shape: int, scale: float) -> Tensor:
            return torch.randn(shape, generator=generator) * scale / shape[-1] ** 0.5

        gates = noise(3 * self.gru, HIDDEN, scale=0.5)
        state_part = noise(self.correction, self.gru, scale=1.0)
        # What the state keeps of an embedding, and its way back out through the target's head.
        kept = state_part @ gates[2 * self.gru :]
        back = torch.linalg.pinv(kept, rcond=0.1)
        return {
            "prefix_gru.weight_ih_l0": gates,
            "prefix_gru.weight_hh_l0": noise(3 * self.gru, self.gru, scale=0.3),
            "embed_proj.0.weight": torch.cat(
                [noise(self.correction, HIDDEN, scale=0.1), state_part], 1
            ),
            "embed_proj.2.weight": self.lean * lm_head @ back
            + noise(VOCAB_SIZE, self.correction, scale=0.2),
        }

    def save(self, folder: Path, target: Path) -> Path:
        """Write the folder."""
        return write_drafter(folder, self.config(), self.weights(target))


@dataclass(frozen=True)
class TinyMTP:
    """An MTP head to be made for a tiny target.

    Attributes:
        own: among the target's own weights, in a copy of its folder.
        sway: how strongly the target's states and the layer carry it away from the successor.
    """

    seed: int = 0
    sway: float = 1.8
    max_positions: int = POSITIONS
    rope_theta: float = 10000.0
    kv_heads: int = KV_HEADS
    own: bool = False

    def config(self, target: Path) -> dict[str, Any]:
        """``config.json``."""
        theirs = json.loads((target / "config.json").read_text())
        if self.own:
            return theirs | {"mtp_num_hidden_layers": 1}
        return {
            "architectures": ["MTPDraftModel"],
            "model_type": theirs["model_type"],
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": 1,
            "mtp_num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": self.kv_heads,
            "head_dim": HEAD_DIM,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "num_target_layers": LAYERS,
            "dtype": "float32",
        }

    def weights(self, target: Path) -> dict[str, Tensor]:
        """Every tensor of the published format, by its name."""
        generator = torch.Generator().manual_seed(2000 + self.seed)
        theirs = json.loads((target / "config.json").read_text())

        def noise(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=generator) * scale / shape[-1] ** 0.5

        hybrid = theirs["model_type"] == "qwen3_5_text"  # norms are zero-centred

        def norm(size: int) -> Tensor:
            return (not hybrid) + 0.1 * torch.randn(size, generator=generator)

        kv = self.kv_heads * HEAD_DIM
        swayed = noise(HIDDEN, HIDDEN, scale=self.sway)
        layer = {
            "input_layernorm": norm(HIDDEN),
            "post_attention_layernorm": norm(HIDDEN),
            "self_attn.q_proj": noise((1 + hybrid) * HEADS * HEAD_DIM, HIDDEN, scale=1.3),
            "self_attn.k_proj": noise(kv, HIDDEN, scale=1.3),
            "self_attn.v_proj": noise(kv, HIDDEN),
            "self_attn.o_proj": noise(HIDDEN, HEADS * HEAD_DIM, scale=self.sway),
            "mlp.gate_proj": noise(INNER, HIDDEN),
            "mlp.up_proj": noise(INNER, HIDDEN),
            "mlp.down_proj": noise(HIDDEN, INNER, scale=self.sway),
        }
        if theirs["model_type"] != "llama":
            layer |= {"self_attn.q_norm": norm(HEAD_DIM), "self_attn.k_norm": norm(HEAD_DIM)}
        found = {
            "mtp.fc": torch.cat([torch.eye(HIDDEN), swayed], 1),
            "mtp.pre_fc_norm_embedding": norm(HIDDEN),
            "mtp.pre_fc_norm_hidden": norm(HIDDEN),
            "mtp.norm": norm(HIDDEN),
        } | {f"mtp.layers.0.{name}": weight for name, weight in layer.items()}
        return {f"{name}.weight": weight.contiguous() for name, weight in found.items()}

    def save(self, folder: Path, target: Path) -> Path:
        """Write the folder."""
        weights = self.weights(target)
        if self.own:
            shutil.copytree(target, folder)
            weights |= load_file(target / "model.safetensors")
        return write_drafter(folder, self.config(target), weights)


def write_drafter(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    """Write a drafter folder from its parts, as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder
