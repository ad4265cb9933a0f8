"""Targets and drafters compute through the kernels what they compute through the plain twins.

Where gradients are enabled the twins run, on any device.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from knockon.drafters.dflash import DFlashDrafter
from knockon.drafters.load import load_drafter
from knockon.layers.attention import PagedKV, SdpaBackend, plan_block
from knockon.layers.fused import dispatch, plan_rows
from knockon.layers.rotary import RotaryEmbedding
from knockon.models.target import load_target
from knockon.parallel import SingleRank
from tests.models.tiny_targets import CASES, make_reference, relative_error
from tests.tiny_models import TinyDrafter, TinyTarget

PAGE = 4


@pytest.fixture
def fused(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Kernels run for every tensor: on a CPU, in the interpreter."""
    for module in (dispatch, plan_rows):
        monkeypatch.setattr(module, "runs_on", lambda tensor: True)
    return kernel_device


def refuse_to_gather(self: RotaryEmbedding, positions: Tensor) -> tuple[Tensor, Tensor]:
    raise AssertionError("the plain path was taken")


def both_ways(program: object, monkeypatch: pytest.MonkeyPatch) -> tuple[list, list]:
    """What ``program`` returns with the twins and with the kernels."""
    assert callable(program)
    plain = program()
    with torch.no_grad(), monkeypatch.context() as patched:
        patched.setattr(RotaryEmbedding, "tables", refuse_to_gather)
        return plain, program()


@pytest.mark.parametrize("name", ["llama, wide heads, biases, linear", "qwen3, tied, biases, yarn"])
def test_hidden_states_features_and_pages(
    name: str, tmp_path: Path, fused: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_reference(*CASES[name]).save_pretrained(tmp_path)
    model = load_target(tmp_path, torch.float32, SingleRank(), fused)
    ids = torch.randint(0, 101, (2, 9), device=fused)
    table = torch.tensor([[3, 1, 6], [2, 5, 4]], device=fused)

    def program() -> list[Tensor]:
        layers, kv_heads, dim = model.kv_shape
        kv = [PagedKV.allocate(7 * PAGE, kv_heads, dim, model.dtype, fused) for _ in range(layers)]
        found = []
        for first, last in ((0, 6), (6, 9)):
            starts = torch.full((2,), first, device=fused)
            plan = plan_block(table, PAGE, starts, last - first, last)
            out = model(ids[:, first:last], plan, kv, (2, 0))
            assert out.features is not None
            found += [out.hidden, out.features]
        return found + [page for pages in kv for page in pages]

    for plain, kernels in zip(*both_ways(program, monkeypatch), strict=True):
        assert relative_error(kernels, plain) < 1e-5


@pytest.mark.parametrize("layer_types", ["sf", "ff"])
def test_a_drafters_block_and_its_pages(
    layer_types: str, tmp_path: Path, fused: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TinyTarget("qwen3").save(tmp_path / "target")
    recipe = replace(TinyDrafter(domino=False), layer_types=layer_types, block_size=5)
    draft = recipe.save(tmp_path / "draft", model)
    target = load_target(model, torch.float32, SingleRank(), fused)
    drafter = load_drafter(draft, target, SdpaBackend(), 64)
    assert isinstance(drafter, DFlashDrafter)
    table = torch.tensor([[3, 1, 6], [2, 5, 4]], device=fused)
    features = torch.randn(2, 6, len(drafter.feature_layers) * 144, device=fused)
    tokens = torch.randint(3, 90, (2, 6), device=fused)

    def program() -> list[Tensor]:
        drafter.bind_kv(7 * PAGE)
        starts = torch.zeros(2, dtype=torch.int64, device=fused)
        drafter.observe(features, tokens, plan_block(table, PAGE, starts, 6, 6))
        block = plan_block(table, PAGE, starts + 6, 5, 11)
        return [drafter.draft(tokens[:, 0], block), drafter._pages]

    for plain, kernels in zip(*both_ways(program, monkeypatch), strict=True):
        assert relative_error(kernels, plain) < 1e-5


def test_gradients_and_fp64_take_the_plain_way(fused: torch.device) -> None:
    x = torch.zeros(3, device=fused)
    assert not dispatch.fuses(x)
    with torch.no_grad():
        assert dispatch.fuses(x)
        assert not dispatch.fuses(x.double())
    with torch.inference_mode():
        assert dispatch.fuses(x)
