"""The configuration of a multi-token-prediction head (spec page, "MTP heads").

Such a head comes with its target (``mtp_num_hidden_layers`` in the target's own ``config.json``),
or in a folder of its own, of the architecture ``MTPDraftModel``: the fields of a one-layer target
and ``num_target_layers``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from knockon.errors import Refused
from knockon.models.config import ARCHITECTURES, ModelConfig, parse_hf
from knockon.models.qwen3_5_config import text_part

MTP_ARCHITECTURE = "MTPDraftModel"
_LAYERS_FIELD = "mtp_num_hidden_layers"


@dataclass(frozen=True)
class MTPConfig:
    """A head of one decoder layer of its target's kind.

    Attributes:
        layer: that layer, as a target of one layer.
        num_target_layers: layers of the target it was made for.
        own: whether it lies among the target's weights.
    """

    layer: ModelConfig
    num_target_layers: int
    own: bool

    num_layers = 1

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.layer.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        return self.layer.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.layer.head_dim

    @property
    def kept_per_position(self) -> int:
        """The target's hidden state of every position is kept: the next row reads it."""
        return self.layer.hidden_size

    @property
    def max_positions(self) -> int:
        """Positions that its rotary embedding was made for."""
        return self.layer.max_positions

    @property
    def sizes(self) -> MTPConfig:
        """See :class:`~knockon.drafters.base.DraftSizes`."""
        return self

    def check_target(self, target: ModelConfig) -> None:
        """Hold the head against the target it is to serve.

        Raises:
            Refused: another kind of layer, or other sizes.
        """
        pairs = (
            ("model_type", self.layer.architecture, target.architecture),
            ("hidden_size", self.layer.hidden_size, target.hidden_size),
            ("vocab_size", self.layer.vocab_size, target.vocab_size),
            ("num_target_layers", self.num_target_layers, target.num_layers),
        )
        for name, ours, theirs in pairs:
            if ours != theirs:
                hint = "It was made for another model."
                raise Refused(f"draft {name}", ours, f"the target's {theirs}", hint)

    def check_context(self, max_positions: int) -> None:
        """Refuse a rotary table shorter than the context served.

        Args:
            max_positions: positions that requests may reach.
        """
        if self.max_positions < max_positions:
            raise Refused(
                "draft max_position_embeddings",
                self.max_positions,
                f"at least max_model_len {max_positions}",
            )


def is_mtp(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is an MTP head's, or a target's that brings one along."""
    architecture = _architecture(config)
    return architecture == MTP_ARCHITECTURE or (
        architecture in ARCHITECTURES and bool(_text_part(config).get(_LAYERS_FIELD))
    )


def parse_mtp_config(config: Mapping[str, Any]) -> MTPConfig:
    """Read the ``config.json`` of a head, or of a target that brings one along.

    Raises:
        Refused: a field that is missing or outside what is accepted; more layers than one.
    """
    count = _text_part(config).get(_LAYERS_FIELD)
    if type(count) is not int or count != 1:
        raise Refused(_LAYERS_FIELD, count, "1: one layer that is run again for every proposal")
    if _architecture(config) != MTP_ARCHITECTURE:
        target = parse_hf(dict(config))
        layer = replace(target, num_layers=1, sliding_windows=(None,), delta=None)
        return MTPConfig(layer, target.num_layers, own=True)
    kinds = {kind: name for name, kind in ARCHITECTURES.items()}
    kinds["qwen3_5_text"] = kinds["qwen3_5"]
    kind = config.get("model_type")
    if kind not in kinds:
        raise Refused("draft model_type", kind, f"the target's, one of {sorted(kinds)}")
    alone: dict[str, Any] = {**config, "architectures": [kinds[kind]]}
    if ARCHITECTURES[kinds[kind]] == "qwen3_5":  # a hybrid's first layer would be recurrent
        alone["layer_types"] = ["full_attention"]
    layer = parse_hf(alone)
    if layer.num_layers != 1:
        raise Refused("draft num_hidden_layers", layer.num_layers, "1")
    if layer.sliding_windows != (None,):
        raise Refused("draft use_sliding_window", True, "false: a full-attention layer")
    layers = config.get("num_target_layers")
    if type(layers) is not int or layers < 1:
        raise Refused("num_target_layers", layers, "the target's number of layers")
    return MTPConfig(layer, layers, own=False)


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    named = _architecture(config)
    hybrid = named is not None and ARCHITECTURES.get(named) == "qwen3_5"
    return text_part(dict(config)) if hybrid else config


def _architecture(config: Mapping[str, Any]) -> str | None:
    named = config.get("architectures")
    if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str):
        return named[0]
    return None
