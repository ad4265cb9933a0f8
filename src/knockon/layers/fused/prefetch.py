"""Weights on their way to the L2 cache before the kernel that multiplies by them."""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from knockon.triton_backend import jit, tl


@jit
def prefetch_rows(
    weight,
    first_row,
    rows,
    columns,
    first_column,
    row_stride,
    BLOCK_ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
):
    """Ask for ``PIECES`` pieces of 512 bytes of each of some rows; nothing waits for them.

    A prefetch makes nothing visible that was not, so it needs no ordering with the kernel before.
    Compute capability 9.0; addresses and row lengths are multiples of 16 bytes.

    Args:
        weight: ``[rows, columns]``, ``row_stride`` elements from row to row.
        first_row, first_column: of the block asked for. What lies past the end is not.
    """
    row = first_row + tl.arange(0, BLOCK_ROWS)[:, None]
    column = first_column + tl.arange(0, PIECES)[None, :] * (512 // ITEM_BYTES)
    # The asm has no mask: what is past the end asks for the last whole piece again.
    row = tl.minimum(row, rows - 1).to(tl.int64)
    column = tl.minimum(column, columns - 512 // ITEM_BYTES)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 512; // $0",
        "=r,l",
        [weight + row * row_stride + column],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
