"""Pages in FP8: what is stored is the rounded row, and attention reads it as it stands."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from knockon.layers.attention import PagedKV, SdpaBackend
from knockon.layers.attention.base import FP8, to_fp8
from knockon.layers.attention.paged import PagedBackend, attend_kernel
from knockon.layers.fused.rotate_and_write import rotate_and_write_kernel, rotate_and_write_plain
from knockon.layers.rotary import RopeConfig, RotaryEmbedding, Rotation
from knockon.triton_backend import interpreted
from tests.layers.attention.test_paged import CAUSAL, FP32, SMALL, Case, Inputs, make_inputs

CASE = Case((3, 20), 5, heads=6, kv_heads=3, dim=32)


def bits(kv: PagedKV) -> list[torch.Tensor]:
    return [pages.view(torch.uint8) for pages in kv]


def fp8_inputs(device: torch.device, dtype: torch.dtype = FP32) -> Inputs:
    inputs = make_inputs(CASE, dtype, device)
    return replace(inputs, kv=PagedKV(*(to_fp8(pages) for pages in inputs.kv)))


def test_rounds_to_even_and_stops_at_the_largest_number() -> None:
    given = torch.tensor([1.0625, 1.1875, -500.0, float("inf"), 449.0, 0.0009765625])
    wanted = torch.tensor([1.0, 1.25, -448.0, 448.0, 448.0, 0.0])
    assert torch.equal(to_fp8(given).float(), wanted)


def test_reads_what_was_written_by_slots_and_in_a_row() -> None:
    kv = PagedKV.allocate(8, 2, 4, FP8)
    rows = torch.randn(1, 3, 2, 4)
    kv.write(rows, -rows, torch.tensor([5, 6, 7]))
    k, v = kv.read(torch.tensor([6, 0]), FP32)
    assert torch.equal(k[0], to_fp8(rows[0, 1]).float()) and not k[1].any()
    assert torch.equal(v, -k)
    assert torch.equal(kv.read(slice(5, 8), FP32)[0], to_fp8(rows[0]).float())


def test_the_store_kernel_writes_the_twins_bits(kernel_device: torch.device) -> None:
    inputs = fp8_inputs(kernel_device)
    if interpreted():  # its own rounding to FP8 loses carries: numbers that need none
        exact = (to_fp8(x).float() for x in (inputs.k, inputs.v))
        inputs.k, inputs.v = exact
    wanted = PagedKV(*(pages.clone() for pages in inputs.kv))
    SdpaBackend().write(inputs.k, inputs.v, wanted, inputs.plan)
    PagedBackend().write(inputs.k, inputs.v, inputs.kv, inputs.plan)
    for got, want in zip(bits(inputs.kv), bits(wanted), strict=True):
        assert torch.equal(got, want)


def test_the_attention_kernel_reads_the_twins_numbers(kernel_device: torch.device) -> None:
    inputs = fp8_inputs(kernel_device)
    SdpaBackend().write(inputs.k, inputs.v, inputs.kv, inputs.plan)
    wanted = SdpaBackend().attend(inputs.q.contiguous(), inputs.kv, inputs.plan, CAUSAL)
    for launch in (SMALL, replace(SMALL, splits=3)):
        got = attend_kernel(inputs.q, inputs.kv, inputs.plan, CAUSAL, launch)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [FP32, torch.float16])
def test_rotated_keys_and_values_go_to_fp8_pages(
    dtype: torch.dtype, kernel_device: torch.device
) -> None:
    rotary = RotaryEmbedding(RopeConfig(1e4), 32, 64, kernel_device)
    generator = torch.Generator().manual_seed(1)
    qkv = to_fp8(torch.randn((2, 3, 12 * 32), generator=generator)).to(kernel_device, dtype)
    positions = torch.tensor([[0, 1, 2], [40, 41, 42]], device=kernel_device)
    slots = torch.tensor([4, 1, 7, 2, 5, 0], device=kernel_device)
    found = []
    for function in (rotate_and_write_kernel, rotate_and_write_plain):
        kv = PagedKV.allocate(9, 3, 32, FP8, kernel_device)
        function(qkv.clone(), Rotation(rotary, positions), slots, kv, None)
        found.append(kv)
    assert torch.equal(found[0].v.view(torch.uint8), found[1].v.view(torch.uint8))
    if interpreted():
        return
    # A rotation may round the last bit otherwise, and the page then the next number.
    torch.testing.assert_close(found[0].k.float(), found[1].k.float(), atol=1e-3, rtol=0.13)
    same = found[0].k.view(torch.uint8) == found[1].k.view(torch.uint8)
    assert same.float().mean() > 0.98
