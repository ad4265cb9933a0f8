"""Noise: a function of seed, position and id alone; uniform, independent, fine near zero."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from knockon.engine.noise import exponential, fresh_seed, hash_words, row_keys

MASK = (1 << 64) - 1
SEEDS = torch.tensor([0, 1, 2, -1, 1 << 40, -(1 << 63), (1 << 63) - 1])
POSITIONS = torch.arange(8)


def reference_word(seed: int, position: int, token: int) -> int:
    def finalise(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    weyl = 0x9E3779B97F4A7C15
    key = finalise((finalise((seed + weyl) & MASK) + position * weyl) & MASK)
    return finalise((key + (token + 1) * weyl) & MASK)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> np.ndarray:
    keys = row_keys(seeds[:, None], positions[None]).reshape(-1)
    words = hash_words(keys, vocab_size).numpy().view(np.uint64)
    return (words >> np.uint64(11)).astype(np.float64).reshape(len(seeds), -1, vocab_size) / 2**53


def test_tensor_words_equal_splitmix64_in_python_integers() -> None:
    keys = row_keys(SEEDS[:, None], POSITIONS[None]).reshape(-1)
    words = hash_words(keys, 5).view(len(SEEDS), len(POSITIONS), 5)
    for s, seed in enumerate(SEEDS.tolist()):
        for p in range(len(POSITIONS)):
            for v in range(5):
                assert words[s, p, v].item() & MASK == reference_word(seed, p, v)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_words_are_the_same_on_both_devices() -> None:
    keys = row_keys(SEEDS[:, None], POSITIONS[None]).reshape(-1)
    on_gpu = row_keys(SEEDS.cuda()[:, None], POSITIONS.cuda()[None]).reshape(-1)
    assert torch.equal(hash_words(keys, 50_000), hash_words(on_gpu, 50_000).cpu())
    torch.testing.assert_close(
        exponential(keys, 50_000), exponential(on_gpu, 50_000).cpu(), rtol=1e-6, atol=0
    )


def test_a_rows_noise_does_not_depend_on_the_batch_or_the_vocabulary_size() -> None:
    keys = row_keys(SEEDS[:, None], POSITIONS[None]).reshape(-1)
    whole = exponential(keys, 64)
    assert torch.equal(whole[3:4], exponential(keys[3:4], 64))
    assert torch.equal(whole[:, :50], exponential(keys, 50))


def test_uniform_over_ids_positions_and_seeds_that_follow_each_other() -> None:
    u = uniforms(torch.arange(32), torch.arange(32), 256)
    for sample in (u.ravel(), u[0, 0], u[:, 0, 0], u[0, :, 0], u[:, :, 17].ravel()):
        assert stats.kstest(sample, "uniform").pvalue > 1e-4


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("lag", [1, 2, 16])
def test_neighbours_are_independent(axis: int, lag: int) -> None:
    u = uniforms(torch.arange(40), torch.arange(40), 256)
    length = u.shape[axis] - lag
    first = u.take(range(length), axis).ravel()
    second = u.take(range(lag, lag + length), axis).ravel()
    table, _, _ = np.histogram2d(first, second, bins=16, range=[[0, 1], [0, 1]])
    assert stats.chisquare(table.ravel()).pvalue > 1e-4
    # The low bits too: they decide nothing alone, but a weak hash shows there first.
    low = np.histogram2d((first * 2**40) % 1, (second * 2**40) % 1, bins=16)[0]
    assert stats.chisquare(low.ravel()).pvalue > 1e-4


def test_swapping_seed_and_position_gives_other_noise() -> None:
    a = row_keys(torch.tensor([3]), torch.tensor([9]))
    b = row_keys(torch.tensor([9]), torch.tensor([3]))
    assert a.item() != b.item()


def test_exponentials_are_finite_positive_and_exponential() -> None:
    e = exponential(row_keys(torch.arange(8), torch.tensor(5)), 1 << 16).ravel().double()
    assert e.isfinite().all() and (e > 0).all()
    assert stats.kstest(e.numpy(), "expon").pvalue > 1e-4


def test_small_exponentials_have_a_fine_grid() -> None:
    e = exponential(row_keys(torch.arange(32), torch.tensor(5)), 1 << 17).ravel()
    small = e[e < 2.0**-12].double().numpy()
    # About a thousand values below 2^-12: nearly all distinct, and uniform there, which 24 bits
    # of resolution (steps of 6e-8) would not show.
    assert len(small) > 800 and len(set(small)) > len(small) - 3
    assert stats.kstest(small * 2.0**12, "uniform").pvalue > 1e-4
    assert e.min() < 2.0**-19


def test_fresh_seeds_differ_and_are_int64() -> None:
    seeds = [fresh_seed() for _ in range(100)]
    assert len(set(seeds)) == 100
    torch.tensor(seeds, dtype=torch.int64)
    assert any(seed < 0 for seed in seeds) and any(seed > 0 for seed in seeds)
