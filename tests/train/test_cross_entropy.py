"""The chunked cross-entropies and their gradients equal autograd's over whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from knockon.train.cross_entropy import chunk_cross_entropy_twin, draft_cross_entropy


@pytest.mark.parametrize("soft", [0.0, 0.4])
@pytest.mark.parametrize("chunk", [3, 100])
def test_equals_autograd(soft: float, chunk: int) -> None:
    torch.manual_seed(0)
    rows, hidden, width, vocab = 8, 6, 4, 50
    z = torch.randn(rows, hidden, requires_grad=True)
    correction = torch.randn(rows, width, requires_grad=True)
    out = torch.randn(vocab, width, requires_grad=True)
    head, teacher = torch.randn(vocab, hidden), torch.randn(rows, hidden)
    labels = torch.randint(0, vocab, (rows,))
    base_weight, final_weight = torch.rand(rows), torch.rand(rows)
    found = draft_cross_entropy(
        z, correction, head, out, labels, base_weight, final_weight, teacher, soft, chunk
    )
    got = torch.autograd.grad(found.loss * 2, (z, correction, out))
    base = z @ head.T
    final = base + correction @ out.T
    wanted = (1 - soft) * F.one_hot(labels, vocab) + soft * (teacher @ head.T).softmax(-1)

    def entropy(logits: torch.Tensor) -> torch.Tensor:
        return -(wanted * logits.log_softmax(-1)).sum(-1)

    loss = (base_weight * entropy(base) + final_weight * entropy(final)).sum()
    want = torch.autograd.grad(loss * 2, (z, correction, out))
    torch.testing.assert_close(found.loss, loss)
    torch.testing.assert_close(found.base, entropy(base))
    torch.testing.assert_close(found.final, entropy(final))
    assert torch.equal(found.final_choice, final.argmax(-1))
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("soft", [0.0, 0.4])
def test_plain_dflash_has_no_correction(soft: float) -> None:
    z, head = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4)
    teacher = torch.randn(5, 4)
    labels, weight = torch.randint(0, 9, (5,)), torch.rand(5)
    found = draft_cross_entropy(
        z, None, head, None, labels, weight * 0.3, weight * 0.7, teacher, soft, chunk=2
    )
    wanted = (1 - soft) * F.one_hot(labels, 9) + soft * (teacher @ head.T).softmax(-1)
    want = -(weight * (wanted * (z @ head.T).log_softmax(-1)).sum(-1)).sum()
    torch.testing.assert_close(found.loss, want)
    assert torch.equal(found.base, found.final)
    assert torch.equal(found.base_choice, found.final_choice)
    (got,) = torch.autograd.grad(found.loss, z)
    torch.testing.assert_close(got, torch.autograd.grad(want, z)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_equals_twin(corrected: bool, soft: bool, dtype: torch.dtype) -> None:
    from knockon.train.cross_entropy_kernel import chunk_cross_entropy

    rows, vocab = 33, 49152
    base = torch.randn(rows, vocab, device="cuda").mul(3).to(dtype)
    shift = torch.randn(rows, vocab, device="cuda").to(dtype) if corrected else None
    teacher = torch.randn(rows, vocab, device="cuda").mul(3).to(dtype) if soft else None
    labels = torch.randint(0, vocab, (rows,), device="cuda")
    weights = torch.rand(2, rows, device="cuda")
    results = []
    for run in (chunk_cross_entropy_twin, chunk_cross_entropy):
        logits = [base.clone(), None if shift is None else shift.clone()]
        losses = [torch.full((rows,), float("nan"), device="cuda") for _ in range(2)]
        choices = [torch.full((rows,), -1, device="cuda") for _ in range(2)]
        run(*logits, teacher, labels, *weights, 0.4, *losses, *choices)
        results.append([x for x in (*logits, *losses, *choices) if x is not None])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-5
        )
