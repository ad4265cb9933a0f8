"""Sizes of targets and their drafters, by name or from a target's ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knockon.drafters.backbone import BackboneConfig
from knockon.drafters.config import DominoConfig, DraftConfig
from knockon.errors import Refused
from knockon.layers.attention import Visibility
from knockon.models.config import ModelConfig, parse_hf
from knockon.models.json_file import read_json_object
from knockon.models.qwen3_5_config import DeltaConfig

BLOCK_SIZE = 16
DRAFT_LAYERS = 5


@dataclass(frozen=True)
class EngineShape:
    """What the time of a step depends on, beside batch, context and precision.

    Attributes:
        dflash: the drafter without a head.
        domino: the same with one.
    """

    name: str
    target: ModelConfig
    dflash: DraftConfig
    domino: DraftConfig

    @property
    def block_size(self) -> int:
        """``L``, rows that a draft has."""
        return self.dflash.block_size


def _decoder(
    architecture: str,
    layers: int,
    hidden: int,
    heads: tuple[int, int, int],
    inner: int,
    vocab: int,
    **others: Any,
) -> dict[str, Any]:
    """The fields of a published ``config.json``; ``heads`` are heads, KV heads, head size."""
    return {
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "intermediate_size": inner,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "dtype": "bfloat16",
    } | others


# Sizes of the published checkpoints.
_QWEN3, _LLAMA, _HYBRID = "Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen3_5ForCausalLM"
_QWEN3_ROPE = {"rope_theta": 1e6, "max_position_embeddings": 40960}
_LLAMA3_ROPE = {
    "rope_theta": 5e5,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_HYBRID_LAYERS = {
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 262144,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3.6-27b": _decoder(_HYBRID, 64, 5120, (24, 4, 256), 17408, 248320, **_HYBRID_LAYERS),
    "qwen3-8b": _decoder(_QWEN3, 36, 4096, (32, 8, 128), 12288, 151936, **_QWEN3_ROPE),
    "qwen3-4b": _decoder(
        _QWEN3, 36, 2560, (32, 8, 128), 9728, 151936, **_QWEN3_ROPE, tie_word_embeddings=True
    ),
    "llama-3.1-8b": _decoder(_LLAMA, 32, 4096, (32, 8, 128), 14336, 128256, **_LLAMA3_ROPE),
    "smollm2-135m": _decoder(
        _LLAMA,
        30,
        576,
        (9, 3, 64),
        1536,
        49152,
        rope_theta=1e5,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "tiny": _decoder(
        _QWEN3, 3, 64, (4, 2, 16), 128, 8192, rope_theta=1e4, max_position_embeddings=4096
    ),
    "tiny-hybrid": _decoder(
        _HYBRID,
        4,
        64,
        (4, 2, 16),
        128,
        8192,
        **_HYBRID_LAYERS
        | {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
}
_GRU_SIZE, _CORRECTION_SIZE = 1024, 256
_TINY_HEAD = (32, 16)


def find_shape(name: str) -> EngineShape:
    """A shape by its name, or by the path of a target's ``config.json`` or folder.

    Raises:
        Refused: neither a known name nor a path, or a configuration that
            :func:`~knockon.models.config.parse_hf` refuses.
    """
    if name in CONFIGS:
        head = _TINY_HEAD if name.startswith("tiny") else (_GRU_SIZE, _CORRECTION_SIZE)
        return shape_of(name, parse_hf(CONFIGS[name]), *head)
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        known = ", ".join(CONFIGS)
        raise Refused("model", name, f"{known}, or the path of a target's config.json")
    label = file.resolve().parent.name if file.name == "config.json" else file.stem
    return shape_of(label, parse_hf(read_json_object(file)))


def shape_of(
    name: str,
    target: ModelConfig,
    gru_size: int = _GRU_SIZE,
    correction_size: int = _CORRECTION_SIZE,
) -> EngineShape:
    """The drafters that DFlash's and Domino's authors would make for ``target``.

    Raises:
        Refused: a target of a single layer, which has none to take features from.
    """
    ids = spread_layers(target.num_layers, DRAFT_LAYERS)
    backbone = BackboneConfig(
        hidden_size=target.hidden_size,
        feature_size=len(ids) * target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope=target.rope,
        max_positions=target.max_positions,
        visibility=(Visibility(causal=False),) * len(ids),
    )

    def draft(domino: DominoConfig | None) -> DraftConfig:
        return DraftConfig(
            backbone=backbone,
            domino=domino,
            vocab_size=target.vocab_size,
            block_size=BLOCK_SIZE,
            num_target_layers=target.num_layers,
            target_layer_ids=ids,
            mask_token_id=target.vocab_size - 1,
        )

    head = DominoConfig(gru_size, correction_size, shift_label=False, prefix_len=1)
    return EngineShape(name, target, draft(None), draft(head))


def spread_layers(layers: int, count: int) -> tuple[int, ...]:
    """``count`` of a target's layers, evenly from the second to the third from the end.

    As DFlash's published drafters have it: of 36 layers 1, 9, 17, 25, 33. A target too small for
    that gives fewer, from all but its last.
    """
    if layers < 2:
        raise Refused("num_hidden_layers", layers, "at least 2, the last of which gives no feature")
    first, last = (1, layers - 3) if layers >= count + 3 else (0, layers - 2)
    count = min(count, last - first + 1)
    if count == 1:
        return (first,)
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


def target_parameters(config: ModelConfig) -> int:
    """Values in the target's checkpoint; a tied head counts once."""
    heads = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    attention = 2 * hidden * heads + 2 * hidden * kv
    if config.architecture == "qwen3_5":  # the output's gate
        attention += hidden * heads
    if config.architecture != "llama":
        attention += 2 * config.head_dim
    if config.attention_bias:
        attention += heads + 2 * kv + hidden
    layer = 3 * hidden * inner + 2 * hidden
    if config.mlp_bias:
        layer += 2 * inner + hidden
    ends = 1 if config.tie_word_embeddings else 2
    mixers = config.num_attention_layers * attention
    if config.delta is not None:
        mixers += sum(config.delta.layers) * _delta_parameters(config.delta, hidden)
    return config.num_layers * layer + mixers + ends * config.vocab_size * hidden + hidden


def _delta_parameters(delta: DeltaConfig, hidden: int) -> int:
    """Of one gated delta net: projections, convolution, decays, the output's norm."""
    keys, values = delta.num_key_heads * delta.key_dim, delta.num_value_heads * delta.value_dim
    each = delta.num_value_heads
    projections = hidden * (2 * keys + 3 * values + 2 * each)
    return projections + delta.conv_width * (2 * keys + values) + 2 * each + delta.value_dim


def draft_parameters(config: DraftConfig) -> int:
    """Values in the drafter's checkpoint."""
    b = config.backbone
    heads, kv = b.num_heads * b.head_dim, b.num_kv_heads * b.head_dim
    hidden = b.hidden_size
    layer = 2 * hidden * heads + 2 * hidden * kv + 3 * hidden * b.intermediate_size
    layer += 2 * hidden + 2 * b.head_dim
    count = b.num_layers * layer + b.feature_size * hidden + 2 * hidden
    if config.domino is not None:
        gru, correction = config.domino.gru_size, config.domino.correction_size
        count += 3 * gru * (hidden + gru) + correction * (hidden + gru)
        count += config.vocab_size * correction
    return count
