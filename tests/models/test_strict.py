"""Strict loading takes every weight exactly once, under any prefix, and names what does not fit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from knockon.errors import Refused
from knockon.models.strict import load_strictly


class Held:
    """A source in memory."""

    def __init__(self, *names: str) -> None:
        self.tensors = {name: torch.full((1,), float(i)) for i, name in enumerate(names)}

    def names(self) -> set[str]:
        return set(self.tensors)

    def get(self, name: str) -> Tensor:
        return self.tensors[name]

    def describe(self) -> str:
        return "held"


def load(source: Held, *wanted: str, **options: tuple[str, ...]) -> dict[str, float]:
    loaded: dict[str, float] = {}
    loaders = {name: lambda x, name=name: loaded.__setitem__(name, x.item()) for name in wanted}
    load_strictly(source, loaders, **options)
    return loaded


@pytest.mark.parametrize("prefix", ["", "model.", "model.model."])
def test_a_prefix_may_be_there_or_not(prefix: str) -> None:
    assert load(Held(f"{prefix}a.weight"), "model.a.weight") == {"model.a.weight": 0.0}


def test_containers_are_named_by_the_caller() -> None:
    source = Held("model.logit_head.gru", "fc")
    loaded = load(source, "gru", "fc", prefixes=("model.", "logit_head."))
    assert loaded == {"gru": 0.0, "fc": 1.0}


def test_missing_unused_and_doubled_names_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(Refused, match=r"missing.*model\.b"):
        load(Held("model.a"), "model.a", "model.b")
    with pytest.raises(Refused, match=r"without a use.*model\.b"):
        load(Held("model.a", "model.b"), "model.a")
    with pytest.raises(Refused, match=r"model\.a.*under two names, 'a' and 'model\.a'"):
        load(Held("model.a", "a"), "model.a")


def test_optional_names_may_lack_and_ignored_suffixes_are_left_alone() -> None:
    source = Held("model.a", "model.layers.0.rotary_emb.inv_freq")
    loaded = load(
        source, "model.a", "lm_head", optional=("lm_head",), ignored_suffixes=("inv_freq",)
    )
    assert loaded == {"model.a": 0.0}


def test_a_loaders_refusal_names_the_weight() -> None:
    def refuse(full: Tensor) -> None:
        raise Refused("weight shape", tuple(full.shape), "(2,)")

    with pytest.raises(Refused, match=r"held: weight a: weight shape: found \(1,\)"):
        load_strictly(Held("a"), {"model.a": refuse})


def test_long_lists_are_cut() -> None:
    with pytest.raises(Refused, match="and 15 more"):
        load(Held(), *(f"model.{i}" for i in range(20)))
