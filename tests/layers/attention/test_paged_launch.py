"""Launch settings follow sizes alone and fit what the kernels assume."""

from __future__ import annotations

import itertools

import pytest

from knockon.layers.attention.paged_launch import attention_launch

SMS = 132


def test_settings_are_legal_for_every_size() -> None:
    sizes = itertools.product(
        (1, 7, 512), (1, 16, 600), (1, 3, 16), (1, 8), (16, 80, 256), (1, 131072), (2, 4)
    )
    for batch, rows, group, kv_heads, dim, capacity, itemsize in sizes:
        launch = attention_launch(batch, rows, group, kv_heads, dim, capacity, itemsize, SMS)
        for block in (launch.block_m, launch.block_n):
            assert block >= 16 and block & (block - 1) == 0
        assert 1 <= launch.splits <= max(1, -(-capacity // launch.block_n))
        # Every product of two blocks stays within the registers of the program's threads.
        held = launch.block_m * (max(dim, 16) + launch.block_n)
        assert held <= 32 * launch.warps * 192


def test_a_context_is_shared_only_where_programs_are_few() -> None:
    def splits(batch: int, rows: int) -> int:
        return attention_launch(batch, rows, 4, 8, 128, 131072, 2, SMS).splits

    assert splits(1, 16) == 16  # 8 programs to 128
    assert splits(8, 16) == 2
    assert splits(32, 16) == 1
    assert splits(1, 1) == 33
    assert splits(1, 4096) == 1


def test_no_more_parts_than_blocks_of_the_capacity() -> None:
    assert attention_launch(1, 1, 4, 8, 128, 130, 2, SMS).splits == 3


@pytest.mark.parametrize("rows", [1, 4, 5, 16])
def test_a_verified_block_is_one_tile(rows: int) -> None:
    """Keys are read once for all rows and all heads that share them."""
    for group in (1, 3, 4, 8):
        launch = attention_launch(64, rows, group, 8, 128, 4096, 2, SMS)
        assert launch.block_m >= rows * group
