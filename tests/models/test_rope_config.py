"""Rotary settings are found wherever configurations put them, and never guessed."""

from __future__ import annotations

from typing import Any

import pytest

from knockon.errors import Refused
from knockon.layers.rotary import RopeConfig
from knockon.models.rope_config import parse_rope

LINEAR = RopeConfig(5e5, "linear", factor=2.0)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
        {
            "rope_theta": 5e5,
            "rope_scaling": None,
            "rope_parameters": {"rope_theta": 500000, "rope_type": "linear", "factor": 2.0},
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0},
                "sliding_attention": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0},
            }
        },
    ],
)
def test_every_place_is_read(config: dict[str, Any]) -> None:
    assert parse_rope(config, 64) == LINEAR


def test_yarn_and_llama3_take_the_context_from_where_transformers_does() -> None:
    yarn = {"type": "yarn", "factor": 4.0}
    assert parse_rope({"rope_theta": 1e6, "rope_scaling": yarn}, 64).original_max_positions == 64
    named = yarn | {"original_max_position_embeddings": 32}
    assert parse_rope({"rope_theta": 1e6, "rope_scaling": named}, 64).original_max_positions == 32


def test_a_missing_base_is_refused_unless_the_family_documents_one() -> None:
    with pytest.raises(Refused, match="rope_theta"):
        parse_rope({}, 64)
    assert parse_rope({}, 64, default_theta=10000.0) == RopeConfig(10000.0)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_theta": 1e4, "rope_scaling": {"mrope_section": [1, 2]}}, "mrope_section"),
        ({"rope_theta": 1e4, "rope_scaling": "yarn"}, "rope_scaling"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"rope_theta": 0.5}, "rope_theta"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "other": {}}},
            "rope_parameters",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_name(config: dict[str, Any], field: str) -> None:
    with pytest.raises(Refused, match=field):
        parse_rope(config, 64)
