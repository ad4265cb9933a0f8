"""What is particular to a Qwen3.5 or 3.6 configuration: nesting, recurrent layers, partial RoPE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from knockon.errors import Refused
from knockon.models.config_fields import read_size

# What a published configuration says beside ``text_config`` and not in it, or in both.
_BESIDE = (
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "quantization_config",
    "tie_word_embeddings",
    "torch_dtype",
)
# How positions of images are laid out. Text has one position a token on every axis, and there the
# interleaved sections are the plain rotation.
_IMAGE_ROPE = ("mrope_interleaved", "mrope_section")
_PARTIAL = "partial_rotary_factor"
# The share of a head that is rotated where a configuration does not say (the family's own).
_DEFAULT_PARTIAL = 0.25
_KINDS = ("linear_attention", "full_attention")


@dataclass(frozen=True)
class DeltaConfig:
    """The gated delta net layers of a hybrid model (arXiv 2412.06464).

    Attributes:
        num_key_heads: heads of queries and keys. num_value_heads: of values, gates and states; each
            key head serves as many value heads in a row.
        key_dim, value_dim: sizes of those heads; a state is ``[key_dim, value_dim]``.
        conv_width: positions that the short convolution reads, its own included.
        layers: one entry a layer of the model: whether it is such a layer.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    layers: tuple[bool, ...]


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The text model's settings of a ``config.json``, all at top level, as parsers want them.

    Raises:
        Refused: a ``text_config`` that is no object, or that contradicts what stands beside it; an
            attention without the family's output gate.
    """
    nested = config.get("text_config", {})
    if not isinstance(nested, dict):
        raise Refused("text_config", nested, "an object")
    flat = dict(nested) if nested else dict(config)
    for name in _BESIDE if nested else ():
        beside, within = config.get(name), nested.get(name)
        if None not in (beside, within) and beside != within and name == "tie_word_embeddings":
            raise Refused(f"text_config.{name}", within, f"{beside!r}, as beside text_config")
        if beside is not None:
            flat[name] = beside
    if flat.get("attn_output_gate", True) is not True:
        raise Refused("attn_output_gate", flat["attn_output_gate"], "true")
    said = flat.get(_PARTIAL) is not None
    for place in ("rope_parameters", "rope_scaling"):
        settings = flat.get(place)
        if isinstance(settings, dict):
            said = said or _PARTIAL in settings
            flat[place] = {k: v for k, v in settings.items() if k not in _IMAGE_ROPE}
    return flat if said else flat | {_PARTIAL: _DEFAULT_PARTIAL}


def parse_delta(config: dict[str, Any], layers: int) -> DeltaConfig | None:
    """The recurrent layers of a text model; ``None`` where it has none.

    Args:
        config: as :func:`text_part` returns it.
        layers: how many the model has.

    Raises:
        Refused: layer types that are unknown or not one a layer; sizes missing or impossible.
    """
    kinds = config.get("layer_types")
    if kinds is None:
        every = read_size(config, "full_attention_interval", 4)
        kinds = [_KINDS[(layer + 1) % every == 0] for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in _KINDS for k in kinds):
        raise Refused("layer_types", kinds, f"{layers} of {' and '.join(map(repr, _KINDS))}")
    recurrent = tuple(kind == "linear_attention" for kind in kinds)
    if not any(recurrent):
        return None
    if all(recurrent):
        raise Refused("layer_types", kinds, "at least one layer of full attention")
    keys = read_size(config, "linear_num_key_heads")
    values = read_size(config, "linear_num_value_heads")
    if values % keys:
        raise Refused(
            "linear_num_value_heads", values, f"a multiple of linear_num_key_heads {keys}"
        )
    width = read_size(config, "linear_conv_kernel_dim", most=64)
    if width < 2:
        raise Refused("linear_conv_kernel_dim", width, "at least 2")
    return DeltaConfig(
        num_key_heads=keys,
        num_value_heads=values,
        key_dim=read_size(config, "linear_key_head_dim"),
        value_dim=read_size(config, "linear_value_head_dim"),
        conv_width=width,
        layers=recurrent,
    )
