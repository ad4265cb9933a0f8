"""Positions and slots of a forward's rows, from page tables."""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from knockon.layers.fused.pdl import follow, pdl
from knockon.triton_backend import jit, power_of_two, runs_on, tl

_MOST_ROWS = 1024  # of one program


def plan_rows(
    page_table: Tensor,
    page_size: int,
    starts: Tensor,
    rows: int,
    counts: Tensor | None,
    null_page: int,
) -> tuple[Tensor, Tensor]:
    """Where ``rows`` rows of each of ``B`` requests stand, and the slots that they are written to.

    A row past its request's count repeats the first position. It, and a row past the page table,
    is written to the null page.

    Args:
        page_table: ``[B, P]`` integers.
        page_size: positions a page.
        starts: ``[B]`` int64, position of each request's first row.
        rows: ``T``.
        counts: ``[B]`` int64, how many of the rows each request has; ``None`` for all.

    Returns:
        Positions ``[B, T]`` and slots ``[B * T]``, int64.
    """
    if runs_on(page_table):
        return plan_rows_kernel(page_table, page_size, starts, rows, counts, null_page)
    return plan_rows_plain(page_table, page_size, starts, rows, counts, null_page)


def plan_rows_plain(
    page_table: Tensor,
    page_size: int,
    starts: Tensor,
    rows: int,
    counts: Tensor | None,
    null_page: int,
) -> tuple[Tensor, Tensor]:
    """The twin of :func:`plan_rows_kernel`."""
    offsets = torch.arange(rows, device=starts.device)
    positions = starts.unsqueeze(1) + offsets
    held = None
    if counts is not None:
        held = offsets < counts.unsqueeze(1)
        positions = torch.where(held, positions, starts.unsqueeze(1))
    pages = positions // page_size
    inside = pages < page_table.shape[1]
    held = inside if held is None else held & inside
    page = page_table.gather(1, pages.clamp(max=page_table.shape[1] - 1))
    slots = page.where(held, null_page) * page_size + positions % page_size
    return positions, slots.flatten()


def plan_rows_kernel(
    page_table: Tensor,
    page_size: int,
    starts: Tensor,
    rows: int,
    counts: Tensor | None,
    null_page: int,
) -> tuple[Tensor, Tensor]:
    """:func:`plan_rows` in one launch."""
    batch, width = page_table.shape
    positions, slots = torch.empty(
        (2, batch, rows), dtype=torch.int64, device=page_table.device
    ).unbind()
    block = min(_MOST_ROWS, power_of_two(rows))
    if slots.numel():
        place[(batch, -(-rows // block))](
            page_table,
            starts.contiguous(),
            starts if counts is None else counts.contiguous(),
            positions,
            slots,
            page_table.stride(0),
            page_table.stride(1),
            width,
            rows,
            null_page,
            page_size,
            COUNTED=counts is not None,
            BLOCK=block,
            num_warps=max(1, block // 256),
            **pdl(slots),
        )
    return positions, slots.flatten()


@jit
def place(
    page_table,
    starts,
    counts,
    positions,
    slots,
    table_stride,
    page_stride,
    width,
    rows,
    null_page,
    page_size,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of one request's rows."""
    follow(PDL)
    request = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    start = tl.load(starts + request)
    held = live
    if COUNTED:
        held = held & (row < tl.load(counts + request))
    position = start + tl.where(held, row, 0)
    page_at = position // page_size
    held = held & (page_at < width)
    entry = page_table + request * table_stride + page_at * page_stride
    page = tl.load(entry, mask=held, other=null_page).to(tl.int64)
    at = request * rows + row
    tl.store(positions + at, position, mask=live)
    tl.store(slots + at, page * page_size + position % page_size, mask=live)
