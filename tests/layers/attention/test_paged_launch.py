"""Launch settings follow sizes alone and fit what the kernels assume."""

from __future__ import annotations

import itertools

import pytest

from knockon.layers.attention.paged_launch import (
    MOST_BLOCK_ROWS,
    attention_launch,
    verify_tile,
)

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

    assert splits(1, 16) == 17  # 8 pairs of a request and a KV head to 136
    assert splits(8, 16) == 3
    assert splits(32, 16) == 1
    assert splits(1, 1) == 17
    assert splits(1, 64) == 4
    assert splits(1, 4096) == 1


def test_no_more_parts_than_blocks_of_the_capacity() -> None:
    assert attention_launch(1, 1, 4, 8, 128, 130, 2, SMS).splits == 3


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_a_block_is_added_up_alike_at_every_width(dim: int, itemsize: int) -> None:
    """Rows and keys at a time, parts of the context, warps."""
    for batch, group, kv_heads in itertools.product((1, 8, 64), (1, 3, 4, 8), (1, 8)):
        launches = [
            attention_launch(batch, rows, group, kv_heads, dim, 4096, itemsize, SMS)
            for rows in range(1, MOST_BLOCK_ROWS + 1)
        ]
        assert len({(x.block_m, x.block_n, x.splits, x.warps) for x in launches}) == 1


def test_a_tile_of_a_block_fills_the_tensor_cores_where_it_fits() -> None:
    assert verify_tile(8, 64, 2) == verify_tile(1024, 128, 2) == 64
    assert verify_tile(8, 256, 2) == 16
    assert verify_tile(8, 128, 4) == 16
    assert verify_tile(1025, 64, 2) == 16


def test_a_prompt_has_larger_tiles() -> None:
    assert attention_launch(1, 8192, 4, 8, 128, 8192, 2, SMS).block_m == 128
    assert attention_launch(32, 256, 4, 8, 128, 4096, 2, SMS).block_m == 64
    assert attention_launch(1, 64, 4, 8, 128, 4096, 2, SMS).block_m == 64
