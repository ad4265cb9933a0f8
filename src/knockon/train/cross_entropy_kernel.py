"""The Triton kernel of the chunked cross-entropies; its plain twin is in `cross_entropy`."""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from torch import Tensor

from knockon.train.triton_kernels import jit, power_of_two, tl


@jit
def _chunk_cross_entropy(
    base,
    shift,
    teacher,
    labels,
    base_weight,
    final_weight,
    soft,
    base_loss,
    final_loss,
    base_choice,
    final_choice,
    vocab,
    SOFT: tl.constexpr,
    CORRECTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    start_of_row = row * vocab
    low = float("-inf")
    best_base = tl.full([BLOCK], low, tl.float32)
    best_final = tl.full([BLOCK], low, tl.float32)
    best_teacher = tl.full([BLOCK], low, tl.float32)
    sum_base = tl.zeros([BLOCK], tl.float32)
    sum_final = tl.zeros([BLOCK], tl.float32)
    sum_teacher = tl.zeros([BLOCK], tl.float32)
    index_base = tl.zeros([BLOCK], tl.int32)
    index_final = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + lane
        inside = at < vocab
        b = tl.load(base + start_of_row + at, mask=inside, other=-1e30).to(tl.float32)
        index_base = tl.where(b > best_base, at, index_base)
        top = tl.maximum(best_base, b)
        sum_base = sum_base * tl.exp(best_base - top) + tl.exp(b - top)
        best_base = top
        if CORRECTED:
            f = b + tl.load(shift + start_of_row + at, mask=inside, other=0.0).to(tl.float32)
            index_final = tl.where(f > best_final, at, index_final)
            top = tl.maximum(best_final, f)
            sum_final = sum_final * tl.exp(best_final - top) + tl.exp(f - top)
            best_final = top
        if SOFT:
            t = tl.load(teacher + start_of_row + at, mask=inside, other=-1e30).to(tl.float32)
            top = tl.maximum(best_teacher, t)
            sum_teacher = sum_teacher * tl.exp(best_teacher - top) + tl.exp(t - top)
            best_teacher = top
    top_base = tl.max(best_base, 0)
    lse_base = top_base + tl.log(tl.sum(sum_base * tl.exp(best_base - top_base), 0))
    chosen = tl.min(tl.where(best_base == top_base, index_base, vocab), 0)
    tl.store(base_choice + row, chosen.to(tl.int64))
    lse_final = lse_base
    if CORRECTED:
        top_final = tl.max(best_final, 0)
        lse_final = top_final + tl.log(tl.sum(sum_final * tl.exp(best_final - top_final), 0))
        chosen = tl.min(tl.where(best_final == top_final, index_final, vocab), 0)
    tl.store(final_choice + row, chosen.to(tl.int64))
    lse_teacher = 0.0
    if SOFT:
        top_teacher = tl.max(best_teacher, 0)
        lse_teacher = top_teacher + tl.log(
            tl.sum(sum_teacher * tl.exp(best_teacher - top_teacher), 0)
        )

    label = tl.load(labels + row)
    weight_base = tl.load(base_weight + row)
    weight_final = tl.load(final_weight + row)
    loss_base = tl.zeros([BLOCK], tl.float32)
    loss_final = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + lane
        inside = at < vocab
        b = tl.load(base + start_of_row + at, mask=inside, other=-1e30).to(tl.float32)
        wanted = tl.where(at == label, 1.0, 0.0)
        if SOFT:
            t = tl.load(teacher + start_of_row + at, mask=inside, other=-1e30).to(tl.float32)
            wanted = (1.0 - soft) * wanted + soft * tl.exp(t - lse_teacher)
        log_base = b - lse_base
        loss_base -= tl.where(wanted > 0, wanted * log_base, 0.0)
        grad_base = weight_base * (tl.exp(log_base) - wanted)
        if CORRECTED:
            f = b + tl.load(shift + start_of_row + at, mask=inside, other=0.0).to(tl.float32)
            log_final = f - lse_final
            loss_final -= tl.where(wanted > 0, wanted * log_final, 0.0)
            grad_final = weight_final * (tl.exp(log_final) - wanted)
            grad_base += grad_final
            tl.store(shift + start_of_row + at, grad_final.to(shift.dtype.element_ty), mask=inside)
        else:
            grad_base += weight_final * (tl.exp(log_base) - wanted)
        tl.store(base + start_of_row + at, grad_base.to(base.dtype.element_ty), mask=inside)
    tl.store(base_loss + row, tl.sum(loss_base, 0))
    if CORRECTED:
        tl.store(final_loss + row, tl.sum(loss_final, 0))
    else:
        tl.store(final_loss + row, tl.sum(loss_base, 0))


def chunk_cross_entropy(
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
    rows, vocab = base.shape
    _chunk_cross_entropy[(rows,)](
        base,
        base if shift is None else shift,
        base if teacher is None else teacher,
        labels,
        base_weight,
        final_weight,
        soft,
        base_loss,
        final_loss,
        base_choice,
        final_choice,
        vocab,
        SOFT=teacher is not None,
        CORRECTED=shift is not None,
        BLOCK=min(2048, power_of_two(vocab)),
        num_warps=8,
    )
