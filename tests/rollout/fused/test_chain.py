"""The chain kernels choose what their plain twin chooses."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from knockon.rollout.fused.chain import (
    ChainWeights,
    Device,
    PoolBase,
    ResidentLaunch,
    TiledLaunch,
    choose_launch,
    own_columns,
    run_chain,
)
from knockon.rollout.fused.chain_plain import run_chain_plain


@dataclass(frozen=True)
class Sizes:
    vocab: int = 60
    gru: int = 20
    correction: int = 12
    pool: int = 24
    steps: int = 5


def chains(
    sizes: Sizes,
    batch: int,
    prefix: int,
    dtype: torch.dtype,
    indexed: bool,
    launch: ResidentLaunch | TiledLaunch | None,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens by the kernel and by the twin, from the same random numbers."""
    rng = torch.Generator().manual_seed(sizes.steps * 1000 + batch * 10 + prefix)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=rng) * scale).to(device)

    v, g, e, rows = sizes.vocab, sizes.gru, sizes.correction, sizes.steps - prefix
    weights = ChainWeights(
        normal(v, 3 * g).to(dtype),
        normal(3 * g + e, g, scale=g**-0.5).to(dtype),
        normal(v, e, scale=e**-0.5).to(dtype),
    )
    drafted = normal(rows, batch, e)
    bonus = torch.randint(v, (batch,), generator=rng).to(device)
    tokens = torch.full((batch, sizes.steps), -1, device=device)
    tokens[:, :prefix] = torch.randint(v, (batch, prefix), generator=rng).to(device)
    pool_ids = torch.stack([torch.randperm(v, generator=rng)[: sizes.pool] for _ in range(batch)])
    shape = (sizes.steps, batch, v) if indexed else (rows, batch, sizes.pool)
    base = PoolBase(normal(*shape).to(dtype), indexed)
    twin = tokens.clone()
    arguments = (weights, drafted, bonus)
    run_chain(*arguments, tokens, pool_ids.int().to(device), base, prefix, launch)
    run_chain_plain(*arguments, twin, pool_ids.int().to(device), base, prefix)
    return tokens, twin


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize(
    "launch",
    (
        ResidentLaunch(1, 4, chunk=32),
        ResidentLaunch(1, 4, chunk=8),
        TiledLaunch(1, 4, 16, block=16, stages=2, pool_rows=8),
        TiledLaunch(1, 4, 16, block=32, stages=2, pool_rows=32),
    ),
)
def test_the_kernels_are_their_twin_in_the_interpreter(
    launch: ResidentLaunch | TiledLaunch, dtype: torch.dtype
) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("compiled there, and tested below")
    for batch, prefix, indexed in ((1, 1, True), (2, 0, False), (1, 2, False)):
        tokens, twin = chains(Sizes(), batch, prefix, dtype, indexed, launch)
        assert torch.equal(tokens, twin)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize(
    "sizes",
    (
        Sizes(vocab=5000, gru=1024, correction=256, pool=2048, steps=15),
        Sizes(vocab=5000, gru=1024, correction=256, pool=500, steps=7),
        Sizes(vocab=3000, gru=256, correction=64, pool=1000, steps=15),
        Sizes(vocab=300, gru=100, correction=33, pool=100, steps=4),
    ),
)
@pytest.mark.parametrize("batch", (1, 2, 3, 8, 17, 64, 128, 150))
def test_the_kernels_are_their_twin_on_a_gpu(sizes: Sizes, batch: int, dtype: torch.dtype) -> None:
    for prefix, indexed in ((1, True), (0, False), (2, False)):
        tokens, twin = chains(sizes, batch, prefix, dtype, indexed, None, "cuda")
        # A near-tie may fall otherwise, and the chain then goes its own way.
        assert (tokens != twin).any(1).sum() <= batch // 50


@pytest.mark.parametrize("weight_bytes", (2, 4))
@pytest.mark.parametrize("batch", (1, 2, 3, 16, 17, 64, 200))
def test_a_launch_fits_its_device(batch: int, weight_bytes: int) -> None:
    for device in (Device(), Device(108, 166_912), Device(58, 101_376)):
        launch = choose_launch(batch, 1024, 256, weight_bytes, device)
        assert launch.programs <= device.processors
        assert launch == choose_launch(batch, 1024, 256, weight_bytes, device)
        if isinstance(launch, TiledLaunch):
            state = launch.requests * (6 if weight_bytes == 2 else 4)
            columns = own_columns(1024, 256, launch.programs) * weight_bytes
            assert launch.stages * launch.block * (state + columns) < device.shared_bytes
            assert launch.stages >= 2 and launch.requests >= min(batch, 16)


def test_the_measured_launches_stand_on_the_device_they_were_measured_on() -> None:
    assert choose_launch(1, 1024, 256, 2, Device()) == ResidentLaunch(128, 8, 16)
    assert choose_launch(8, 1024, 256, 2, Device()) == TiledLaunch(128, 4, 16, 512, 2, 128)
    assert choose_launch(64, 1024, 256, 2, Device()) == TiledLaunch(128, 4, 64, 128, 4, 128)
    # Weights of 64 programs are too many for registers.
    assert isinstance(choose_launch(1, 1024, 256, 2, Device(108)), TiledLaunch)
