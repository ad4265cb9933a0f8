"""Positions and slots are the twin's, whatever the counts and wherever rows fall."""

from __future__ import annotations

import pytest
import torch

from knockon.layers.fused.plan_rows import plan_rows_kernel, plan_rows_plain


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize(
    ("batch", "width", "page_size", "rows"),
    [(1, 1, 1, 1), (3, 5, 4, 7), (2, 40, 16, 16), (1, 3, 16, 1), (1, 9, 16, 1100), (4, 1, 64, 2)],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_kernel_equals_twin(
    batch: int,
    width: int,
    page_size: int,
    rows: int,
    counted: bool,
    dtype: torch.dtype,
    kernel_device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(rows)
    wide = torch.randint(1, 1000, (batch, width + 3), generator=generator, dtype=dtype)
    table = wide.to(kernel_device)[:, :width]
    # The last rows of some requests lie past their tables.
    starts = torch.randint(0, width * page_size, (batch,), generator=generator)
    counts = torch.randint(0, rows + 1, (batch,), generator=generator) if counted else None
    starts = starts.to(kernel_device)
    counts = counts.to(kernel_device) if counts is not None else None
    for null_page in (0, 3):
        got = plan_rows_kernel(table, page_size, starts, rows, counts, null_page)
        wanted = plan_rows_plain(table, page_size, starts, rows, counts, null_page)
        for one, other in zip(got, wanted, strict=True):
            assert one.dtype == torch.int64
            assert torch.equal(one, other)
