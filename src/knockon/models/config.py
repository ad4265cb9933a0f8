"""What a target model is: its sizes and settings, read from a Hugging Face ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from knockon.errors import Refused
from knockon.layers.rotary import RopeConfig
from knockon.models.config_fields import MOST_LAYERS, MOST_VALUES, read_flag, read_size
from knockon.models.qwen3_5_config import DeltaConfig, parse_delta, text_part
from knockon.models.rope_config import parse_rope

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5ForCausalLM": "qwen3_5",
}
DRAFTERS = ("DFlashDraftModel", "DominoDraftModel", "MTPDraftModel")

# The base that a family's configurations may leave out (transformers' LlamaConfig documents it).
_DEFAULT_THETA = {"llama": 10000.0}
_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder of the Llama, Qwen3 or Qwen3.5 family.

    Attributes:
        architecture: ``"llama"``, ``"qwen3"`` or ``"qwen3_5"``.
        max_positions: positions that the model is meant for (YaRN's extension included).
        attention_bias: biases on the query, key, value and output projections. mlp_bias: on the
            three of the MLP.
        eos_token_ids: ids that end a generation, most specific first; may be empty.
        dtype: of the checkpoint's weights.
        sliding_windows: one entry a layer: how many positions back it sees, itself included, or
            ``None`` for all.
        delta: its recurrent layers, if it has any; the others are layers of full attention.
        zero_centred_norms: whether norms multiply by ``1 + weight``.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: torch.dtype
    sliding_windows: tuple[int | None, ...]
    delta: DeltaConfig | None = None
    zero_centred_norms: bool = False

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer keeps a state in place of keys and values."""
        return self.delta is not None and self.delta.layers[layer]

    @property
    def num_attention_layers(self) -> int:
        """Layers that keep keys and values."""
        return self.num_layers - (sum(self.delta.layers) if self.delta is not None else 0)


def parse_hf(
    config: dict[str, Any], generation_config: dict[str, Any] | None = None
) -> ModelConfig:
    """Read a target's ``config.json``.

    Args:
        config: its content.
        generation_config: the content of ``generation_config.json``, whose end-of-sequence ids come
            before those of ``config``.

    Raises:
        Refused: a drafter's configuration, an unknown architecture, a quantised checkpoint, a
            missing or impossible size, rotary settings as in :func:`parse_rope`.
    """
    architecture = parse_architecture(config)
    hybrid = architecture == "qwen3_5"
    if hybrid:
        config = text_part(config)
    if config.get("quantization_config"):
        quantization = config["quantization_config"]
        known = isinstance(quantization, dict)
        method = quantization.get("quant_method", "unknown") if known else quantization
        raise Refused(
            "quantization_config.quant_method",
            method,
            "an unquantised checkpoint or a GGUF file",
            "Quantised weights need kernels that are not part of this engine.",
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise Refused("hidden_act", activation, "'silu'")
    hidden = read_size(config, "hidden_size")
    heads = read_size(config, "num_attention_heads")
    kv_heads = read_size(config, "num_key_value_heads", heads)
    layers = read_size(config, "num_hidden_layers", most=MOST_LAYERS)
    positions = read_size(config, "max_position_embeddings")
    rope = parse_rope(config, positions, _DEFAULT_THETA.get(architecture))
    if rope.partial_rotary_factor != 1 and not hybrid:
        raise Refused(
            "partial_rotary_factor", rope.partial_rotary_factor, f"1 for {architecture} models"
        )
    return ModelConfig(
        architecture=architecture,
        vocab_size=read_size(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=read_size(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=parse_head_dim(config.get("head_dim"), hidden, heads),
        rms_norm_eps=parse_epsilon(config.get("rms_norm_eps")),
        rope=rope,
        max_positions=extended_positions(rope, positions),
        tie_word_embeddings=read_flag(config, "tie_word_embeddings"),
        attention_bias=read_flag(config, "attention_bias"),
        mlp_bias=read_flag(config, "mlp_bias"),
        eos_token_ids=_eos_ids(generation_config or {}, config),
        bos_token_id=config.get("bos_token_id"),
        dtype=_dtype(config),
        sliding_windows=(None,) * layers if hybrid else _sliding_windows(config, layers),
        delta=parse_delta(config, layers) if hybrid else None,
        zero_centred_norms=hybrid,
    )


def parse_architecture(config: dict[str, Any]) -> str:
    """The family of a configuration.

    Raises:
        Refused: none or several architectures named, a drafter, or one that is not known.
    """
    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise Refused("architectures", named, f"a list of one of {sorted(ARCHITECTURES)}")
    if named[0] in DRAFTERS:
        raise Refused(
            "architectures",
            named[0],
            f"a target model, one of {sorted(ARCHITECTURES)}",
            "This is a drafter: give it as the draft of a target, not as the model.",
        )
    if named[0] not in ARCHITECTURES:
        raise Refused("architectures", named[0], f"one of {sorted(ARCHITECTURES)}")
    return ARCHITECTURES[named[0]]


def parse_head_dim(explicit: Any, hidden_size: int, num_heads: int) -> int:
    """``head_dim`` as given, or hidden size over heads; even, since rotary works on pairs."""
    if explicit is None:
        if hidden_size % num_heads:
            raise Refused(
                "num_attention_heads", num_heads, f"a divisor of hidden_size {hidden_size}"
            )
        explicit = hidden_size // num_heads
    whole = isinstance(explicit, int) and not isinstance(explicit, bool)
    if not whole or not 2 <= explicit <= MOST_VALUES or explicit % 2:
        raise Refused("head_dim", explicit, f"an even number, at least 2 and at most {MOST_VALUES}")
    return explicit


def parse_epsilon(value: Any) -> float:
    """``rms_norm_eps``: small, since anything else would drown what is normalised."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise Refused("rms_norm_eps", value, "a number, at least 0 and less than 1")
    return float(value)


def extended_positions(rope: RopeConfig, max_positions: int) -> int:
    """Positions a model may be run at: YaRN's factor extends the original context."""
    if rope.kind == "yarn" and rope.original_max_positions is not None:
        return max(max_positions, int(rope.factor * rope.original_max_positions))
    return max_positions


def _dtype(config: dict[str, Any]) -> torch.dtype:
    """The declared dtype; transformers documents FP32 for configurations that declare none."""
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if not isinstance(name, str) or name not in _DTYPES:
        # Not "dtype" alone, which is what the caller asks for.
        raise Refused("dtype of config.json", name, f"one of {sorted(_DTYPES)}")
    return _DTYPES[name]


def _eos_ids(*sources: dict[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise Refused("eos_token_id", token, "token ids")
            if token not in ids:
                ids.append(token)
    return tuple(ids)


def _sliding_windows(config: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    """As ``layer_types`` say, or the layers from ``max_window_layers`` on; if in use at all."""
    if not config.get("use_sliding_window"):
        types = config.get("layer_types") or []
        if not isinstance(types, list):
            raise Refused("layer_types", types, "a list, one entry a layer")
        if "sliding_attention" in types:
            raise Refused(
                "use_sliding_window", config.get("use_sliding_window"), "true, as layer_types say"
            )
        return (None,) * layers
    window = read_size(config, "sliding_window")
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers")
        if isinstance(first, bool) or not isinstance(first, int):
            raise Refused("max_window_layers", first, "a number of layers, with use_sliding_window")
        return tuple(window if layer >= first else None for layer in range(layers))
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(t not in kinds for t in types):
        raise Refused("layer_types", types, f"{layers} of 'full_attention' and 'sliding_attention'")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
