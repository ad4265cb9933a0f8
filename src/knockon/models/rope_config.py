"""Read the rotary settings of a Hugging Face configuration, wherever that keeps them.

Three places are in use: ``rope_theta`` (and ``partial_rotary_factor``) at top level,
``rope_scaling``, and ``rope_parameters`` (transformers 5), the last flat or nested by layer type.
Where a value stands in several places they must agree.
"""

from __future__ import annotations

import logging
from typing import Any, cast

from knockon.errors import Refused
from knockon.layers.rotary import RopeConfig, RopeKind

logger = logging.getLogger(__name__)

# What each kind reads besides the base; the values are those it cannot do without.
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_TOP_LEVEL = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_KNOWN = {
    *_TOP_LEVEL,
    "rope_type",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
}


def parse_rope(
    config: dict[str, Any], max_positions: int, default_theta: float | None = None
) -> RopeConfig:
    """The rotary settings of a model or drafter configuration.

    Args:
        config: the content of ``config.json``.
        max_positions: ``max_position_embeddings``; as in transformers it stands for the original
            context of Llama-3 and YaRN scaling where the configuration does not name that.
        default_theta: the base that the model family documents for configurations without one.

    Raises:
        Refused: no base anywhere and no documented default; values that disagree between places;
            an unknown kind or setting; a setting missing or out of range.
    """
    found = _collect(config)
    kind = found.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in _REQUIRED:
        raise Refused("rope_type", kind, f"one of {sorted(_REQUIRED)}")
    unknown = sorted(set(found) - _KNOWN)
    if unknown:
        raise Refused("rope_parameters", unknown, f"settings among {sorted(_KNOWN)}")
    if "rope_theta" not in found:
        if default_theta is None:
            raise Refused(
                "rope_theta",
                None,
                "a number at top level, in rope_parameters or in rope_scaling",
                "It is never guessed: a wrong base spoils long contexts in silence.",
            )
        logger.info("rope_theta is absent; the family's documented default is %g", default_theta)
        found["rope_theta"] = default_theta
    for name in _REQUIRED[kind]:
        if name not in found:
            raise Refused(f"rope_parameters.{name}", None, f"a number, for rope_type {kind!r}")

    numbers: dict[str, Any] = {
        name: _number(name, found[name]) for name in found if name not in ("rope_type", "truncate")
    }
    original = numbers.pop("original_max_position_embeddings", None)
    theta, partial = numbers.pop("rope_theta"), numbers.get("partial_rotary_factor", 1.0)
    if theta <= 1:
        raise Refused("rope_theta", theta, "more than 1")
    if not 0 < partial <= 1:
        raise Refused("partial_rotary_factor", partial, "more than 0, at most 1")
    if numbers.get("factor", 1.0) <= 0:
        raise Refused("rope_parameters.factor", numbers["factor"], "more than 0")
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise Refused(
            "rope_parameters.low_freq_factor",
            numbers["low_freq_factor"],
            f"less than high_freq_factor {numbers['high_freq_factor']}",
        )
    truncate = found.get("truncate", True)
    if not isinstance(truncate, bool):
        raise Refused("rope_parameters.truncate", truncate, "true or false")
    scaled = kind in ("llama3", "yarn")
    return RopeConfig(
        theta=theta,
        kind=cast(RopeKind, kind),
        original_max_positions=int(original or max_positions) if scaled else None,
        truncate=truncate,
        **numbers,
    )


def _collect(config: dict[str, Any]) -> dict[str, Any]:
    """Every rotary setting under one name, checked to agree between the places it stands in."""
    found: dict[str, Any] = {}

    def note(name: str, value: Any, place: str) -> None:
        if value is None:
            return
        name = "rope_type" if name == "type" else name
        if name in found and found[name] != value:
            raise Refused(f"{place}{name}", value, f"{found[name]!r}, as elsewhere in the config")
        found[name] = value

    for place in ("rope_parameters", "rope_scaling"):
        settings = config.get(place)
        if settings is None:
            continue
        if not isinstance(settings, dict):
            raise Refused(place, settings, "an object")
        for name, value in _flat(settings, place).items():
            note(name, value, f"{place}.")
    for name in _TOP_LEVEL:
        note(name, config.get(name), "")
    return found


def _flat(settings: dict[str, Any], place: str) -> dict[str, Any]:
    """Settings nested by layer type, where every layer type has the same ones; else as they are."""
    nested = [value for value in settings.values() if isinstance(value, dict)]
    if not nested:
        return settings
    if len(nested) != len(settings) or any(value != nested[0] for value in nested):
        raise Refused(place, settings, "the same rotary settings for every layer type")
    return nested[0]


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise Refused(f"rope_parameters.{name}", value, "a number below 1e30")
    return float(value)
