"""Rows in FP8 stand for what they were made of, to within the code's rounding."""

from __future__ import annotations

import pytest
import torch

from knockon.rollout.fp8_rows import CODE, LEAST, launch_quantise_rows, quantise_rows_plain

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rows(seed: int, dtype: torch.dtype, count: int = 5, width: int = 96) -> torch.Tensor:
    """Rows of very different sizes, elements of many magnitudes, one row of zeros."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=rng) * torch.randn(count, width, generator=rng).exp()
    x *= 10.0 ** torch.randint(-3, 3, (count, 1), generator=rng)
    x[1] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_is_off_by_a_sixteenth_of_itself_or_less(dtype: torch.dtype) -> None:
    for seed in range(4):
        x = rows(seed, dtype)
        codes, scales = quantise_rows_plain(x)
        assert codes.dtype == CODE and scales.dtype == torch.float32 and scales.shape == (5, 1)
        exact, scale = x.double(), scales.double()
        off = (codes.double() * scale - exact).abs()
        slack = 1 + 2**-20  # of the FP32 product that is rounded to a code
        assert (off <= slack * torch.maximum(2**-4 * exact.abs(), 2**-10 * scale)).all()


def test_the_largest_element_has_the_largest_code_and_zeros_stay_zeros() -> None:
    x = rows(0, torch.float32)
    codes, scales = quantise_rows_plain(x)
    assert (codes[[0, 2, 3, 4]].float().abs().amax(1) == 448).all()
    assert (codes[1].float() == 0).all() and scales[1] == LEAST / 448


def test_what_is_not_finite_leaves_a_nan_in_its_own_row() -> None:
    x = rows(1, torch.float32)
    x[0, 3], x[2, 4] = torch.nan, torch.inf
    codes, scales = quantise_rows_plain(x)
    products = (codes.float() * scales).sum(1)
    assert products.isnan().tolist() == [True, False, True, False, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_gives_the_same_codes_and_scales(
    dtype: torch.dtype, kernel_device: torch.device
) -> None:
    for seed, width in ((0, 96), (1, 16), (2, 160)):
        x = rows(seed, dtype, width=width).to(kernel_device)
        wide = torch.cat((x, x), dim=1)[:, :width]  # rows that do not follow each other
        wanted, wanted_scales = quantise_rows_plain(x)
        for given in (x, wide):
            codes, scales = launch_quantise_rows(given)
            assert torch.equal(scales, wanted_scales)
            if kernel_device.type == "cuda":
                assert torch.equal(codes.float(), wanted.float())
            else:
                check_in_interpreter(codes.float(), wanted.float())


def check_in_interpreter(codes: torch.Tensor, wanted: torch.Tensor) -> None:
    """Its cast takes ties up, loses the carry into a power of two, and cuts subnormals."""
    mantissa, _ = wanted.abs().frexp()
    lost = (mantissa == 0.5) | (wanted.abs() < 2**-6)
    assert (lost | ((codes - wanted).abs() <= 2**-3 * wanted.abs())).all()
    assert (codes == wanted).double().mean() > 0.8


@pytest.mark.gpu
def test_the_kernel_leaves_nan_in_the_same_rows(kernel_device: torch.device) -> None:
    x = rows(1, torch.bfloat16)
    x[0, 3], x[2, 4] = torch.nan, torch.inf
    codes, _ = launch_quantise_rows(x.to(kernel_device))
    assert codes.float().isnan().any(1).tolist() == [True, False, True, False, False]
