"""BF16 weights and FP32 numbers in three BF16 parts multiply as exactly as FP32 does."""

from __future__ import annotations

import pytest
import torch

from knockon.rollout.products import bmm_into, linear, three_parts


def wide_numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-60, 60, shape, generator=rng).double()
    return (torch.randn(shape, generator=rng).double() * 2.0**exponent).float()


def check_parts(x: torch.Tensor) -> None:
    parts = three_parts(x)
    assert parts.dtype == torch.bfloat16
    assert torch.equal(parts.double().sum(1), x.double())


def test_three_parts_add_up_to_the_number() -> None:
    check_parts(wide_numbers(5, 1000))
    ends = torch.tensor([[0.0, -0.0, 1.0, -1024.0, 1 + 2**-23, 3.4e38, -(2.0**-100), 1 / 3]])
    check_parts(ends)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = x.new_full((len(x), 4, weight.shape[1]), 5.0)
    bmm_into(out[:, :3], three_parts(x), weight.transpose(1, 2))
    assert (out[:, 3] == 5.0).all()
    return out[:, :3].sum(1)


def check_product(device: str) -> None:
    rng = torch.Generator().manual_seed(1)
    for batch, pool, width in ((3, 50, 64), (5, 33, 3), (2, 2048, 256)):
        x = torch.randn(batch, width, generator=rng).to(device)
        weight = torch.randn(batch, pool, width, generator=rng).bfloat16().to(device)
        exact = (weight.double() @ x.double().unsqueeze(2)).squeeze(2)
        scale = (weight.double().abs() @ x.double().abs().unsqueeze(2)).squeeze(2)
        assert ((product(x, weight).double() - exact).abs() <= scale * 2.0**-21).all()
        whole = (x * 64).round()  # small integers: any order of summation is exact
        weight = (weight * 8).round()
        exact = (weight.double() @ whole.double().unsqueeze(2)).squeeze(2)
        assert torch.equal(product(whole, weight).double(), exact)


def test_a_product_in_parts_is_an_fp32_product() -> None:
    check_product("cpu")


@pytest.mark.gpu
def test_a_product_in_parts_on_a_gpu_is_an_fp32_product() -> None:
    check_product("cuda")
    check_parts(wide_numbers(64, 256).cuda())


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
def test_a_linear_map_of_sixteen_bits_has_fp32_sums(dtype: torch.dtype, device: str) -> None:
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(7, 512, generator=rng).to(device, dtype)
    weight = torch.randn(24, 512, generator=rng).to(device, dtype)
    out = linear(x, weight, torch.float32)
    assert out.dtype == torch.float32
    exact = x.double() @ weight.double().t()
    scale = x.double().abs() @ weight.double().abs().t()
    assert ((out.double() - exact).abs() <= scale * 2.0**-20).all()
    mixed = linear(x.float(), weight, torch.float32)
    assert ((mixed.double() - exact).abs() <= scale * 2.0**-20).all()
