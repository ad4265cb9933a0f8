"""Kernels equal their plain twins on a GPU; sampling follows its distribution."""

from __future__ import annotations

import pytest
import torch

from knockon.train import decode_kernels as ops


def close(ours: torch.Tensor, theirs: torch.Tensor, limit: float = 1e-2) -> None:
    error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
    assert error < limit, float(error)


def test_greedy_takes_the_lowest_of_tied_ids_and_samples_by_probability() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]]).repeat(4000, 1)
    greedy = ops.sample(logits, torch.zeros(4000), 0.0, torch.tensor(3))
    assert greedy.eq(1).all()
    drawn = ops.sample(logits, torch.full((4000,), 2.0), 0.0, torch.tensor(3))
    share = torch.bincount(drawn, minlength=4) / 4000
    assert (share - (logits[0] / 2).softmax(0)).abs().max() < 0.03
    cut = ops.sample(logits, torch.full((4000,), 2.0), 0.5, torch.tensor(3))
    assert set(cut.tolist()) == {1, 2}


@pytest.mark.gpu
def test_kernels_equal_twins_on_the_device() -> None:
    torch.manual_seed(0)
    rows, size, heads, kv_heads, dim, capacity = 37, 576, 9, 3, 64, 640

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x, residual, weight = draw(rows, size), draw(rows, size), draw(size)
    twin_residual = residual.clone()
    theirs = ops.add_rms_norm_twin(x, twin_residual, weight, 1e-5)
    close(ops.add_rms_norm(x, residual, weight, 1e-5), theirs)
    close(residual, twin_residual)
    gate_up = draw(rows, 3072)
    close(ops.silu_mul(gate_up), ops.silu_mul_twin(gate_up))

    qkv = draw(rows, (heads + 2 * kv_heads) * dim)
    positions = torch.randint(0, capacity, (rows,), device="cuda")
    positions[0], positions[1], positions[2] = 0, 63, capacity - 1
    angles = torch.outer(torch.arange(capacity), torch.rand(dim // 2)).cuda()
    kept = [draw(rows, kv_heads, capacity, dim) for _ in range(2)]
    twin = [tensor.clone() for tensor in kept]
    offsets = torch.arange(rows, device="cuda") * kv_heads * capacity * dim + positions * dim
    args = (qkv, positions, angles.cos(), angles.sin(), heads)
    query = ops.rope_and_store(*args, *kept, offsets, capacity * dim)
    close(query, ops.rope_and_store_twin(*args, *twin, offsets, capacity * dim))
    close(kept[0], twin[0])
    assert torch.equal(kept[1], twin[1])
    close(
        ops.decode_attention(query, *kept, positions),
        ops.decode_attention_twin(query, *kept, positions),
    )


@pytest.mark.gpu
def test_sampling_kernel_follows_the_distribution() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]], device="cuda").repeat(20000, 1)
    cold, warm = torch.zeros(20000, device="cuda"), torch.full((20000,), 2.0, device="cuda")
    seed = torch.tensor(3, device="cuda")
    assert ops.sample(logits, cold, 0.0, seed).eq(1).all()
    share = torch.bincount(ops.sample(logits, warm, 0.0, seed), minlength=4) / 20000
    assert (share - (logits[0] / 2).softmax(0)).abs().max() < 0.02
    assert set(ops.sample(logits, warm, 0.5, seed).tolist()) == {1, 2}
    wide = torch.randn(64, 49152, device="cuda").to(torch.bfloat16)
    wide[0, 7] = wide[0, 40000] = 9.0
    greedy = ops.sample(wide, torch.zeros(64, device="cuda"), 0.0, seed)
    best = wide.float().amax(-1, keepdim=True)
    assert torch.equal(greedy, (wide.float() == best).int().argmax(-1))
