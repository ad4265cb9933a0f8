"""The objective's cross-entropies over a whole vocabulary, never holding all logits at once.

The frozen head's logits of every row would be the largest tensor of training by far. Rows are
therefore taken in chunks: logits, loss and the loss's gradient to the hidden rows are computed for
one chunk, and its logits' memory is used for the next. The backward pass only scales what the
forward has already found.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from knockon.train.cross_entropy_kernel import chunk_cross_entropy


class RowLosses(NamedTuple):
    """Loss and measures of one step.

    Attributes:
        loss: scalar, ``sum(weight * row loss)``; differentiable in the inputs.
        base, final: per-row cross-entropies ``[R]`` of the base and of base + correction.
        base_choice, final_choice: ``[R]`` int64 argmaxes.
    """

    loss: Tensor
    base: Tensor
    final: Tensor
    base_choice: Tensor
    final_choice: Tensor


def draft_cross_entropy(
    z: Tensor,
    correction: Tensor | None,
    head: Tensor,
    out_weight: Tensor | None,
    labels: Tensor,
    base_weight: Tensor,
    final_weight: Tensor,
    teacher: Tensor | None = None,
    soft: float = 0.0,
    chunk: int = 4096,
) -> RowLosses:
    """``sum_r final_weight_r CE(base_r + correction_r) + base_weight_r CE(base_r)``.

    ``base = z @ head^T`` is rounded to the head's dtype; ``base + correction @ out_weight^T`` is
    summed in FP32.

    Args:
        z: ``[R, H]`` backbone rows.
        correction: ``[R, E]`` inputs of the correction's last product, zero in uncorrected rows;
            None for plain DFlash.
        head: ``[V, H]`` frozen, the target's.
        out_weight: ``[V, E]``, trained.
        labels: ``[R]`` int64.
        base_weight, final_weight: ``[R]`` FP32, normalised by the caller.
        teacher: ``[R, H]`` hidden states of the target that predict the labels; wanted where `soft`
            > 0.
        soft: share of the target's own distribution in what the cross-entropies are taken against;
            the rest is the label.
        chunk: rows whose logits live at once.
    """
    values = _DraftCrossEntropy.apply(
        z,
        correction,
        head,
        out_weight,
        labels,
        base_weight,
        final_weight,
        teacher if soft > 0 else None,
        soft,
        chunk,
    )
    return RowLosses(*values)


class _DraftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        correction: Tensor | None,
        head: Tensor,
        out_weight: Tensor | None,
        labels: Tensor,
        base_weight: Tensor,
        final_weight: Tensor,
        teacher: Tensor | None,
        soft: float,
        chunk: int,
    ) -> tuple[Tensor, ...]:
        rows = z.shape[0]
        dtype = head.dtype
        z_low = z.to(dtype)
        grad_z = torch.empty_like(z_low)
        corrected = None
        if correction is not None and out_weight is not None:
            corrected = _Correction(correction, out_weight, dtype)
        base_loss = torch.empty(rows, device=z.device, dtype=torch.float32)
        final_loss = torch.empty_like(base_loss)
        base_choice = torch.empty_like(labels)
        final_choice = torch.empty_like(labels)
        run = chunk_cross_entropy if z.is_cuda else chunk_cross_entropy_twin
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            base = z_low[part] @ head.T
            shift = None if corrected is None else corrected.logits(part)
            target = None if teacher is None else teacher[part].to(dtype) @ head.T
            run(
                base,
                shift,
                target,
                labels[part],
                base_weight[part],
                final_weight[part],
                soft,
                base_loss[part],
                final_loss[part],
                base_choice[part],
                final_choice[part],
            )
            torch.mm(base, head, out=grad_z[part])
            if corrected is not None and shift is not None:
                corrected.learn(part, shift)
        loss = (base_weight * base_loss + final_weight * final_loss).sum()
        found = () if corrected is None else (corrected.grad, corrected.grad_out)
        ctx.save_for_backward(grad_z, *found)
        ctx.dtypes = [None if x is None else x.dtype for x in (z, correction, out_weight)]
        ctx.mark_non_differentiable(base_loss, final_loss, base_choice, final_choice)
        return loss, base_loss, final_loss, base_choice, final_choice

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        scaled = [(part * grad).to(dtype) for part, dtype in zip(saved, ctx.dtypes, strict=False)]
        to_z, to_correction, to_out = scaled if len(scaled) == 3 else (*scaled, None, None)
        return (to_z, to_correction, None, to_out, *(None,) * 6)


class _Correction:
    """The correction's last product and its gradients, a chunk of rows at a time."""

    def __init__(self, entered: Tensor, out_weight: Tensor, dtype: torch.dtype) -> None:
        self.entered, self.out_weight = entered.to(dtype), out_weight.to(dtype)
        self.grad = torch.empty_like(self.entered)
        self.grad_out = torch.zeros_like(out_weight, dtype=torch.float32)

    def logits(self, part: slice) -> Tensor:
        return self.entered[part] @ self.out_weight.T

    def learn(self, part: slice, grad: Tensor) -> None:
        torch.mm(grad, self.out_weight, out=self.grad[part])
        self.grad_out += grad.T @ self.entered[part]


def chunk_cross_entropy_twin(
    base: Tensor,
    shift: Tensor | None,
    teacher: Tensor | None,
    labels: Tensor,
    base_weight: Tensor,
    final_weight: Tensor,
    soft: float,
    base_loss: Tensor,
    final_loss: Tensor,
    base_choice: Tensor,
    final_choice: Tensor,
) -> None:
    """Losses and argmaxes of one chunk; its logits are overwritten with the loss's gradients.

    Args:
        base, shift: ``[C, V]`` logits of the head and of the correction, None where nothing is
            corrected. In place of them come the gradients to the base (both terms together) and to
            the correction.
        teacher: ``[C, V]`` logits of the target, or None.
        base_loss, final_loss, base_choice, final_choice: ``[C]``, written.
    """
    low = base.float()
    sums = low if shift is None else low + shift.float()
    wanted = torch.zeros_like(low).scatter_(1, labels[:, None], 1.0)
    if teacher is not None:
        wanted = (1 - soft) * wanted + soft * teacher.float().softmax(-1)
    log_base, log_final = low.log_softmax(-1), sums.log_softmax(-1)
    base_loss.copy_(-(wanted * log_base).sum(-1))
    final_loss.copy_(-(wanted * log_final).sum(-1))
    base_choice.copy_(low.argmax(-1))
    final_choice.copy_(sums.argmax(-1))
    final_grad = final_weight[:, None] * (log_final.exp() - wanted)
    base.copy_(final_grad + base_weight[:, None] * (log_base.exp() - wanted))
    if shift is not None:
        shift.copy_(final_grad)
