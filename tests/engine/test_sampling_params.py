"""Sampling parameters: what is accepted, how it is normalised, and what each refusal names."""

from __future__ import annotations

import math

import numpy as np
import pytest

from knockon.engine.sampling_params import SamplingParams
from knockon.errors import Refused


def test_defaults_sample_the_models_own_distribution() -> None:
    params = SamplingParams()
    assert params.temperature == 1.0 and not params.greedy and not params.penalised
    assert (params.top_p, params.top_k, params.min_p, params.max_tokens) == (1.0, 0, 0.0, 256)


def test_lists_lone_strings_and_numpy_numbers_are_normalised() -> None:
    params = SamplingParams(
        temperature=np.float32(0),
        stop="END",
        stop_token_ids=[np.int64(3)],
        bad_words=["a", "b"],
        max_tokens=np.int64(4),
        top_k=-1,
        seed=-5,
    )
    assert params.greedy and type(params.temperature) is float
    assert params.stop == ("END",) and params.bad_words == ("a", "b")
    assert params.stop_token_ids == (3,) and type(params.max_tokens) is int
    assert params.top_k == 0 and params.seed == -5
    assert hash(params) == hash(params)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", None),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("top_p", -1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", True),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("seed", 1.0),
        ("seed", True),
        ("seed", 1 << 63),
        ("seed", -(1 << 63) - 1),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", None),
        ("max_tokens", True),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 3),
        ("stop", None),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", "12"),
        ("bad_words", [""]),
        ("bad_words", {"a": 1}),
        ("logprobs", -1),
        ("logprobs", True),
        ("logprobs", 2.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.5),
        ("frequency_penalty", math.nan),
        ("frequency_penalty", 10**400),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", "yes"),
    ],
)
def test_a_refusal_names_the_field_and_the_value(field: str, value: object) -> None:
    with pytest.raises(Refused) as refused:
        SamplingParams(**{field: value})
    assert refused.value.field == field
    assert repr(refused.value.found) in str(refused.value)


@pytest.mark.parametrize("name", ("stop", "bad_words"))
def test_strings_are_text_of_bounded_size(name: str) -> None:
    for value, message in (
        (["\ud800"], "UTF-8"),
        (["x" * 257], "found .257 characters., wanted at most 256"),
        (["x"] * 65, "found .65 strings., wanted at most 64"),
    ):
        with pytest.raises(Refused, match=message):
            SamplingParams(**{name: value})
    SamplingParams(**{name: ["x" * 256] * 64})
