"""The paged drafters compute what the specification says, state by state.

Each case runs a real target and a real drafter over pages dealt at random, for several requests of
different lengths at once, and holds the block's hidden states and every proposal to a dense
reference that shares no code with them. Faults that only cost acceptance show here first.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from knockon.drafters.base import Drafter
from knockon.drafters.dflash import DFlashDrafter
from knockon.drafters.domino import DominoDrafter
from knockon.drafters.load import load_drafter
from knockon.layers.attention import PagedKV, SdpaBackend, plan_block
from knockon.models.target import load_target
from knockon.parallel import SingleRank
from tests.engine.generation import TinyShelf
from tests.reference_speculation import ReferenceDrafter
from tests.tiny_models import TinyDrafter, TinyTarget, write_drafter

PAGE = 4
LENGTHS = (1, 11, 37, 70)
BASE = TinyDrafter()
CASES: dict[str, TinyDrafter] = {
    "dflash": replace(BASE, domino=False),
    "dflash, all sliding": replace(BASE, domino=False, layer_types="ss", window=7),
    "domino": BASE,
    "domino, all full": replace(BASE, layer_types="ff"),
    "domino, all sliding": replace(BASE, layer_types="sss", window=9),
    "domino, one-row window": replace(BASE, layer_types="sf", window=1),
    "domino, window within the block": replace(BASE, layer_types="fs", window=5),
    "domino, window beyond every context": replace(BASE, layer_types="sf", window=400),
    "domino, shifted": replace(BASE, shift_label=True),
    "domino, no pure prefix": replace(BASE, prefix_len=0),
    "domino, pure prefix of 3": replace(BASE, prefix_len=3, shift_label=True),
    "domino, small block": replace(BASE, block_size=5),
    "domino, block of 2": replace(BASE, block_size=2),
    "domino, one feature layer": replace(BASE, target_layer_ids=(1,)),
    "domino, feature layers out of order": replace(BASE, target_layer_ids=(2, 0, 1)),
    "domino, another rotary base": replace(BASE, rope_theta=50.0),
}


class PagedStates:
    """Requests of several lengths whose tokens the target has run and the drafter has observed."""

    def __init__(self, model: Path, draft: Path, pool_size: int = 0, chunk: int = 16) -> None:
        group = SingleRank()
        self.target = load_target(model, torch.float64, group)
        self.drafter: Drafter = load_drafter(
            draft, self.target, SdpaBackend(), 200, pool_size=pool_size
        )
        generator = torch.Generator().manual_seed(len(LENGTHS))
        self.tokens = [torch.randint(0, 300, (n,), generator=generator).tolist() for n in LENGTHS]
        self.bonus = torch.randint(0, 300, (len(LENGTHS),), generator=generator)
        each = -(-(max(LENGTHS) + self.drafter.block_size) // PAGE)
        pages = torch.randperm(each * len(LENGTHS), generator=generator) + 1
        self.page_table = pages.view(len(LENGTHS), each)
        slots = (int(pages.max()) + 1) * PAGE
        layers, kv_heads, dim = self.target.kv_shape
        kv = [PagedKV.allocate(slots, kv_heads, dim, torch.float64) for _ in range(layers)]
        self.drafter.bind_kv(slots)
        for row, tokens in enumerate(self.tokens):
            for start in range(0, len(tokens), chunk):
                part = torch.tensor([tokens[start : start + chunk]])
                end = start + part.shape[1]
                table, at = self.page_table[row : row + 1], torch.tensor([start])
                plan = plan_block(table, PAGE, at, part.shape[1], end)
                output = self.target(part, plan, kv, self.drafter.feature_layers)
                assert output.features is not None
                self.drafter.observe(output.features, part, plan)

    def propose(self, steps: int) -> tuple[Tensor, Tensor]:
        """``Z [B, L, H]`` and proposals ``[B, steps]``."""
        block = self.drafter.block_size
        starts = torch.tensor(LENGTHS)
        plan = plan_block(self.page_table, PAGE, starts, block, max(LENGTHS) + block)
        backbone = self.drafter
        if isinstance(backbone, DominoDrafter):
            backbone = backbone.backbone
        assert isinstance(backbone, DFlashDrafter)
        z = backbone.draft(self.bonus, plan)
        return z, self.drafter.propose(self.bonus, plan, steps)


def check(model: Path, draft: Path, pool_size: int = 0, steps: int | None = None) -> None:
    states = PagedStates(model, draft, pool_size)
    reference = ReferenceDrafter(draft, model)
    steps = states.drafter.block_size - 1 if steps is None else steps
    z, proposals = states.propose(steps)
    for row, tokens in enumerate(states.tokens):
        features = reference.features(tokens)
        bonus = int(states.bonus[row])
        expected = reference.block(features, bonus)
        # The rotary tables are FP32; everything else is FP64 on both sides.
        torch.testing.assert_close(z[row], expected, rtol=0, atol=2e-4)
        assert (
            proposals[row].tolist() == reference.propose(features, bonus, steps, pool_size).tokens
        )


@pytest.mark.parametrize("case", CASES)
def test_block_and_proposals_are_those_of_the_specification(tiny: TinyShelf, case: str) -> None:
    check(tiny.target(), tiny.drafter(CASES[case]))


@pytest.mark.parametrize("recipe", [TinyTarget("qwen3"), TinyTarget(tied=True, permuted=False)])
@pytest.mark.parametrize("case", ["dflash", "domino", "domino, shifted"])
def test_other_targets_lend_their_embedding_and_head(
    tiny: TinyShelf, recipe: TinyTarget, case: str
) -> None:
    check(tiny.target(recipe), tiny.drafter(CASES[case], recipe))


@pytest.mark.parametrize("pool_size", [1, 7, 100, 306, 307])
def test_the_candidate_pool_is_that_of_the_specification(tiny: TinyShelf, pool_size: int) -> None:
    check(tiny.target(), tiny.drafter(BASE), pool_size)


@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_fewer_steps_make_the_pool_of_fewer_rows(tiny: TinyShelf, steps: int) -> None:
    check(tiny.target(), tiny.drafter(BASE), pool_size=9, steps=steps)


def rewrite(draft: Path, folder: Path, change: Any) -> Path:
    config = json.loads((draft / "config.json").read_text())
    change(config)
    return write_drafter(folder, config, load_file(draft / "model.safetensors"))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("place", ["is_causal", "dflash_config.causal"])
def test_an_explicit_causality_overrides_the_layer_types(
    tiny: TinyShelf, tmp_path: Path, place: str, causal: bool
) -> None:
    def change(config: dict[str, Any]) -> None:
        if place == "is_causal":
            config["is_causal"] = causal
        else:
            config["dflash_config"]["causal"] = causal

    check(tiny.target(), rewrite(tiny.drafter(BASE), tmp_path, change))


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_the_rotary_base_is_found_where_it_stands(
    tiny: TinyShelf, tmp_path: Path, place: str
) -> None:
    def change(config: dict[str, Any]) -> None:
        del config["rope_theta"]
        config[place] = {"rope_type": "default", "rope_theta": 333.0}

    moved = rewrite(tiny.drafter(BASE), tmp_path / place, change)
    same = tiny.drafter(replace(BASE, rope_theta=333.0))
    z, proposals = PagedStates(tiny.target(), moved).propose(15)
    expected_z, expected = PagedStates(tiny.target(), same).propose(15)
    assert torch.equal(z, expected_z)
    assert torch.equal(proposals, expected)


def test_fields_may_stand_at_top_level(tiny: TinyShelf, tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config |= config.pop("dflash_config")

    moved = rewrite(tiny.drafter(BASE), tmp_path, change)
    z, proposals = PagedStates(tiny.target(), moved).propose(15)
    expected_z, expected = PagedStates(tiny.target(), tiny.drafter(BASE)).propose(15)
    assert torch.equal(z, expected_z)
    assert torch.equal(proposals, expected)


@pytest.mark.parametrize("chunk", [1, 5, 16, 70])
def test_how_the_prompt_was_cut_does_not_matter(tiny: TinyShelf, chunk: int) -> None:
    draft = tiny.drafter(BASE)
    z, proposals = PagedStates(tiny.target(), draft, chunk=chunk).propose(15)
    expected_z, expected = PagedStates(tiny.target(), draft, chunk=9).propose(15)
    torch.testing.assert_close(z, expected_z, rtol=0, atol=1e-10)
    assert torch.equal(proposals, expected)


@pytest.mark.parametrize("wrong", [(1, 2), (2, 0), (0, 1)])
def test_the_reference_tells_features_of_other_layers(
    tiny: TinyShelf, tmp_path: Path, wrong: tuple[int, int]
) -> None:
    """The comparison above has teeth: layers shifted by one, or swapped, do not pass it."""

    def change(config: dict[str, Any]) -> None:
        config["dflash_config"]["target_layer_ids"] = list(wrong)

    reference = ReferenceDrafter(tiny.drafter(BASE), tiny.target())
    states = PagedStates(tiny.target(), rewrite(tiny.drafter(BASE), tmp_path, change))
    z, _ = states.propose(15)
    expected = reference.block(reference.features(states.tokens[3]), int(states.bonus[3]))
    assert (z[3] - expected).abs().max() > 0.05
