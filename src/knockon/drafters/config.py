"""The configuration of a published drafter, read strictly (spec page, "Checkpoint format")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from knockon.drafters.backbone import BackboneConfig
from knockon.errors import Refused
from knockon.layers.attention import Visibility
from knockon.models.config import parse_epsilon, parse_head_dim
from knockon.models.rope_config import parse_rope

ARCHITECTURES = ("DFlashDraftModel", "DominoDraftModel")
PROJECTORS = ("dflash", "domino")
_MISSING = object()
_TOO_LARGE = 1 << 24  # damage, which would exhaust memory before a weight is held to it


class TargetSizes(Protocol):
    """What a drafter is held to of its target."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...


@dataclass(frozen=True)
class DominoConfig:
    """Sizes and conventions of the Domino head."""

    gru_size: int
    correction_size: int
    shift_label: bool
    prefix_len: int


@dataclass(frozen=True)
class DraftConfig:
    """A drafter as its ``config.json`` describes it.

    Attributes:
        domino: ``None`` for plain DFlash.
        num_target_layers: layers of the target it was made for.
    """

    backbone: BackboneConfig
    domino: DominoConfig | None
    vocab_size: int
    block_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int

    @property
    def sizes(self) -> BackboneConfig:
        """See :class:`~knockon.drafters.base.DraftSizes`."""
        return self.backbone

    @property
    def max_positions(self) -> int:
        """Positions that its rotary embedding was made for."""
        return self.backbone.max_positions

    def check_target(self, target: TargetSizes) -> None:
        """Hold the drafter against the target it is to serve.

        Args:
            target: a :class:`~knockon.models.config.ModelConfig`, or another engine's sizes.

        Raises:
            Refused: sizes that differ, or layers that the target does not have.
        """
        pairs = (
            ("hidden_size", self.backbone.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("num_target_layers", self.num_target_layers, target.num_layers),
        )
        for name, ours, theirs in pairs:
            if ours != theirs:
                raise Refused(
                    f"draft {name}",
                    ours,
                    f"the target's {theirs}",
                    "It was made for another model.",
                )
        for layer in self.target_layer_ids:
            if not 0 <= layer < target.num_layers - 1:
                raise Refused(
                    "dflash_config.target_layer_ids",
                    layer,
                    f"0 to {target.num_layers - 2}; the last layer is refused because publishers "
                    "differ on whether it is meant before or after the final norm",
                )

    def check_context(self, max_positions: int) -> None:
        """Refuse a rotary table shorter than the context served.

        Args:
            max_positions: positions that requests may reach.
        """
        if self.backbone.max_positions < max_positions:
            raise Refused(
                "draft max_position_embeddings",
                self.backbone.max_positions,
                f"at least max_model_len {max_positions}",
            )


def parse_draft_config(config: Mapping[str, Any]) -> DraftConfig:
    """Read a drafter's ``config.json``.

    Raises:
        Refused: a field that is missing, contradicts itself, or is outside what is accepted.
    """
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else named
    if architecture not in ARCHITECTURES:
        raise Refused(
            "draft architectures", architecture, " or ".join(ARCHITECTURES), "Is it a target model?"
        )
    if not isinstance(config.get("dflash_config") or {}, Mapping):
        raise Refused("dflash_config", config["dflash_config"], "an object")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise Refused("draft hidden_act", activation, "'silu', a Qwen3 layer's")
    if _find(config, "draft_vocab_size", None) not in (None, config.get("vocab_size")):
        raise Refused(
            "draft_vocab_size",
            _find(config, "draft_vocab_size", None),
            f"vocab_size {config.get('vocab_size')}: a drafter borrows the target's head whole",
        )
    default = "domino" if architecture == "DominoDraftModel" else "dflash"
    projector = _find(config, "projector_type", default)
    if projector not in PROJECTORS:
        raise Refused("dflash_config.projector_type", projector, " or ".join(PROJECTORS))
    hidden = _positive(config, "hidden_size")
    layer_ids = _layer_ids(config)
    vocab_size = _positive(config, "vocab_size")
    block_size = _positive(config, "block_size")
    if block_size < 2:
        raise Refused("block_size", block_size, "at least 2")
    mask = _integer(config, "mask_token_id")
    if not 0 <= mask < vocab_size:
        raise Refused(
            "dflash_config.mask_token_id", mask, f"0 to vocab_size - 1 = {vocab_size - 1}"
        )
    max_positions = _positive(config, "max_position_embeddings")
    heads = _positive(config, "num_attention_heads")
    kv_heads = _positive(config, "num_key_value_heads")
    backbone = BackboneConfig(
        hidden_size=hidden,
        feature_size=hidden * len(layer_ids),
        intermediate_size=_positive(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=parse_head_dim(_positive(config, "head_dim"), hidden, heads),
        rms_norm_eps=_epsilon(config),
        rope=parse_rope(dict(config), max_positions),
        max_positions=max_positions,
        visibility=_visibility(config, _positive(config, "num_hidden_layers")),
    )
    return DraftConfig(
        backbone=backbone,
        domino=_domino(config, block_size) if projector == "domino" else None,
        vocab_size=vocab_size,
        block_size=block_size,
        num_target_layers=_positive(config, "num_target_layers"),
        target_layer_ids=layer_ids,
        mask_token_id=mask,
    )


def _find(config: Mapping[str, Any], field: str, default: Any = _MISSING) -> Any:
    """A field from ``dflash_config`` or the top level; where both exist they must agree."""
    nested = (config.get("dflash_config") or {}).get(field, _MISSING)
    top = config.get(field, _MISSING)
    if nested is not _MISSING and top is not _MISSING and nested != top:
        raise Refused(f"dflash_config.{field}", nested, f"the top level's {field} = {top!r}")
    value = nested if nested is not _MISSING else top
    if value is _MISSING:
        if default is _MISSING:
            raise Refused(field, None, "a value in config.json or its dflash_config")
        return default
    return value


def _integer(config: Mapping[str, Any], field: str) -> int:
    value = _find(config, field)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refused(field, value, "an integer")
    return value


def _positive(config: Mapping[str, Any], field: str) -> int:
    value = _integer(config, field)
    if not 1 <= value < _TOO_LARGE:
        raise Refused(field, value, f"an integer of at least 1 and below {_TOO_LARGE}")
    return value


def _epsilon(config: Mapping[str, Any]) -> float:
    return parse_epsilon(_find(config, "rms_norm_eps"))


def _layer_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    ids = _find(config, "target_layer_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise Refused("dflash_config.target_layer_ids", ids, "a list of layer numbers")
    if len(set(ids)) != len(ids):
        raise Refused("dflash_config.target_layer_ids", ids, "each layer once")
    return tuple(ids)


def _visibility(config: Mapping[str, Any], layers: int) -> tuple[Visibility, ...]:
    """Full layers see the whole block; sliding ones are causal and windowed, unless overridden."""
    kinds = config.get("layer_types") or ["full_attention"] * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise Refused("layer_types", kinds, f"{layers} entries, one a draft layer")
    causal = (config.get("dflash_config") or {}).get("causal", _MISSING)
    top = config.get("is_causal", _MISSING)
    if causal is not _MISSING and top is not _MISSING and causal != top:
        raise Refused("dflash_config.causal", causal, f"the top level's is_causal = {top!r}")
    override = causal if causal is not _MISSING else top
    if override is _MISSING:
        override = None
    elif not isinstance(override, bool):
        raise Refused("is_causal", override, "true or false")
    found = []
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise Refused("layer_types", kind, "full_attention or sliding_attention")
        sliding = kind == "sliding_attention"
        window = _positive(config, "sliding_window") if sliding else None
        found.append(Visibility(sliding if override is None else override, window))
    return tuple(found)


def _domino(config: Mapping[str, Any], block_size: int) -> DominoConfig:
    prefix = _integer(config, "pure_draft_prefix_len")
    if not 0 <= prefix < block_size:
        raise Refused("dflash_config.pure_draft_prefix_len", prefix, f"0 to {block_size - 1}")
    shift = _find(config, "shift_label")
    if not isinstance(shift, bool):
        raise Refused("dflash_config.shift_label", shift, "true or false")
    return DominoConfig(
        gru_size=_positive(config, "gru_hidden_dim"),
        correction_size=_positive(config, "emb_dim"),
        shift_label=shift,
        prefix_len=prefix,
    )
