"""The noise that kernels make is the plain function's."""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from knockon.engine.fused.gumbel import exponent, finalise, log_exponential, row_key
from knockon.engine.noise import exponential, hash_words, row_keys
from knockon.triton_backend import interpreted, jit, tl

SEEDS = [0, 1, -1, 12345, 1 << 40, (1 << 63) - 1, -(1 << 63)]


@jit
def noise_rows(seeds, positions, words, noise, width, DEVICE: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    key = row_key(tl.load(seeds + row), tl.load(positions + row))
    at = row * width + ids
    steps = (ids + 1).to(tl.int64).to(tl.uint64, bitcast=True)
    bits = finalise(key + steps * 0x9E3779B97F4A7C15).to(tl.int64, bitcast=True)
    tl.store(words + at, bits, mask=ids < width)
    tl.store(noise + at, log_exponential(key, ids, DEVICE), mask=ids < width)


@jit
def exponents(x, y, DEVICE: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(y + at, exponent(tl.load(x + at), DEVICE))


def run(width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, and what the kernels make of the same seeds and positions."""
    seeds = torch.tensor(SEEDS, device=device)
    positions = torch.arange(len(SEEDS), device=device) * 1000
    words = torch.empty((len(SEEDS), width), dtype=torch.int64, device=device)
    noise = torch.empty((len(SEEDS), width), device=device)
    grid = (len(SEEDS), -(-width // 128))
    device_functions = not interpreted()
    noise_rows[grid](seeds, positions, words, noise, width, DEVICE=device_functions, TILE=128)
    return row_keys(seeds, positions), words, noise


def test_words_are_those_of_the_plain_function(kernel_device: torch.device) -> None:
    keys, words, _ = run(300, kernel_device)
    assert torch.equal(words, hash_words(keys, 300))


def test_noise_is_that_of_the_plain_function(kernel_device: torch.device) -> None:
    keys, _, noise = run(300, kernel_device)
    wanted = exponential(keys, 300).log_()
    torch.testing.assert_close(noise, wanted, rtol=3e-7, atol=3e-7)


@pytest.mark.gpu
def test_noise_is_that_of_the_plain_function_bit_for_bit() -> None:
    keys, _, noise = run(200_000, torch.device("cuda"))
    assert torch.equal(noise, exponential(keys, 200_000).log_())


@pytest.mark.gpu
def test_exponents_are_pytorchs_bit_for_bit() -> None:
    x = -torch.rand(1 << 20, device="cuda") * 80
    y = torch.empty_like(x)
    exponents[(1 << 10,)](x, y, DEVICE=True, TILE=1 << 10)
    assert torch.equal(y, x.exp())
