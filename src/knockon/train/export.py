"""Writing a trained drafter in the published format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from knockon.drafters.mtp_config import MTP_ARCHITECTURE
from knockon.errors import Refused
from knockon.models.config import ModelConfig
from knockon.train.drafter_module import DraftModule
from knockon.train.mtp_module import MTPModule

INDEX = "model.safetensors.index.json"


def draft_config_dict(
    target: ModelConfig,
    *,
    layers: int,
    target_layer_ids: tuple[int, ...],
    mask_token_id: int,
    block_size: int = 16,
    gru_size: int = 256,
    correction_size: int = 64,
    shift_label: bool = True,
    prefix_len: int = 1,
    domino: bool = True,
) -> dict[str, Any]:
    """The ``config.json`` of a drafter as wide as its target, of full-attention layers."""
    _refuse_rope(target)
    dflash: dict[str, Any] = {
        "mask_token_id": mask_token_id,
        "target_layer_ids": list(target_layer_ids),
    }
    if domino:
        dflash |= {
            "projector_type": "domino",
            "pure_draft_prefix_len": prefix_len,
            "gru_hidden_dim": gru_size,
            "emb_dim": correction_size,
            "shift_label": shift_label,
        }
    return {
        "architectures": ["DominoDraftModel" if domino else "DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope.theta,
        "max_position_embeddings": target.max_positions,
        "layer_types": ["full_attention"] * layers,
        "vocab_size": target.vocab_size,
        "block_size": block_size,
        "num_target_layers": target.num_layers,
        "dflash_config": dflash,
    }


def mtp_config_dict(target: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of an MTP head: one layer of its target's kind and sizes."""
    _refuse_rope(target)
    return {
        "architectures": [MTP_ARCHITECTURE],
        "model_type": target.architecture,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope.theta,
        "max_position_embeddings": target.max_positions,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
    }


def _refuse_rope(target: ModelConfig) -> None:
    if target.rope.kind != "default":
        raise Refused(
            "target rope",
            target.rope.kind,
            "default: a drafter is trained with plain rotary angles",
        )


def named_weights(module: DraftModule | MTPModule) -> dict[str, Tensor]:
    """The module's own weights, or views of them, by their published names."""
    return module.published() if isinstance(module, MTPModule) else _block_weights(module)


def published_weights(module: DraftModule | MTPModule) -> dict[str, Tensor]:
    """Weights by their published names, BF16, on the CPU."""
    found = named_weights(module)
    return {name: w.detach().to("cpu", torch.bfloat16).contiguous() for name, w in found.items()}


def _block_weights(module: DraftModule) -> dict[str, Tensor]:
    ours = module.config.backbone
    queries, keys = ours.num_heads * ours.head_dim, ours.num_kv_heads * ours.head_dim
    backbone = module.backbone
    found: dict[str, Tensor] = {
        "fc.weight": backbone.fc.weight,
        "hidden_norm.weight": backbone.hidden_norm.weight,
        "norm.weight": backbone.norm.weight,
    }
    for index, layer in enumerate(module.draft_layers):
        q, k, v = layer.qkv.weight.split((queries, keys, keys))
        gate, up = layer.gate_up.weight.chunk(2)
        parts = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.o.weight,
            "self_attn.q_norm": layer.q_norm.weight,
            "self_attn.k_norm": layer.k_norm.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down.weight,
            "input_layernorm": layer.input_norm.weight,
            "post_attention_layernorm": layer.post_norm.weight,
        }
        found |= {f"layers.{index}.{name}.weight": weight for name, weight in parts.items()}
    if module.config.domino is not None:
        found |= {
            "prefix_gru.weight_ih_l0": cast(Tensor, module.prefix_gru.weight_ih_l0),
            "prefix_gru.weight_hh_l0": cast(Tensor, module.prefix_gru.weight_hh_l0),
            "embed_proj.0.weight": module.correction_in,
            "embed_proj.2.weight": module.correction_out,
        }
    return found


def export(
    module: DraftModule | MTPModule,
    config: dict[str, Any],
    folder: Path,
    card: str,
    max_shard: int = 14_000_000,
) -> None:
    """Writes ``config.json``, weights in shards and ``README.md``.

    Args:
        config: from `draft_config_dict` or `mtp_config_dict`.
        card: text of the model card.
        max_shard: bytes of weights a file, at most.

    Raises:
        Refused: weights that are not finite, or a tensor larger than a shard.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.safetensors"):
        stale.unlink()
    shards: list[dict[str, Tensor]] = [{}]
    sizes = [0]
    for name, weight in published_weights(module).items():
        if not bool(torch.isfinite(weight).all()):
            raise Refused(name, "inf or NaN", "finite weights")
        size = weight.numel() * weight.element_size()
        if size > max_shard:
            raise Refused(name, size, f"at most {max_shard} bytes a shard")
        if sizes[-1] + size > max_shard:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = weight
        sizes[-1] += size
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "README.md").write_text(card)


def _plain(value: Any) -> str:
    """A fact as text: counts by name are listed."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return str(value)


def _kind(config: dict[str, Any]) -> tuple[str, str, str]:
    """What a drafter is called, its tag, and what it consists of."""
    if config["architectures"] == [MTP_ARCHITECTURE]:
        what = (
            "One decoder layer of the target's kind that reads the target's hidden state after "
            "the final norm and the next token's embedding, run again for every proposal."
        )
        return "An MTP head", "mtp", what
    dflash = config["dflash_config"]
    what = (
        f"A block drafter of {config['num_hidden_layers']} layers with block size "
        f"{config['block_size']}"
    )
    if dflash.get("projector_type") == "domino":
        gru, width = dflash["gru_hidden_dim"], dflash["emb_dim"]
        what += f" and a Domino head (GRU {gru}, correction {width})"
    what += (
        ". Context features are taken after the target's layers "
        f"{', '.join(map(str, dflash['target_layer_ids']))}."
    )
    if dflash.get("projector_type") == "domino":
        return "A Domino drafter", "domino", what
    return "A DFlash drafter", "dflash", what


def model_card(
    target_name: str,
    target_license: str,
    config: dict[str, Any],
    data: dict[str, Any],
    training: dict[str, Any],
    table: str,
) -> str:
    """The README of an exported drafter: what it is for, how it was made, how well it does."""
    rows = "\n".join(f"- {name}: {_plain(value)}" for name, value in (data | training).items())
    title, tag, what = _kind(config)
    return f"""---
license: {target_license}
base_model: {target_name}
tags: [speculative-decoding, {tag}, knockon]
---
# {title} for {target_name}

{what} It proposes tokens that {target_name} verifies, so it changes how fast answers come and never
what they are. It borrows the target's embedding and LM head and is of no use without it.

## How it was made

Every training token was written by the target: greedy and sampled answers to prompts that the
target wrote itself (its chat template fed up to the user's turn) and to those of a file, if one was
given. None of the prompts measured below was used.

{rows}

`train.yaml` beside this file holds all settings; `knockon train --config train.yaml` makes such a
drafter again.

## Accept length

Greedy, held-out prompts, by replaying the target's own answers; columns are verify widths, `first`
is the share of right first proposals.

```
{table}
```

Licence: {target_license}, as the target whose outputs it was trained on.
"""
