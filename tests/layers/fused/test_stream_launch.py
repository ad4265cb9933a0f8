"""Which products leave cuBLAS: those that were measured, and no others."""

from __future__ import annotations

import pytest

from knockon.layers.fused import stream_launch
from knockon.layers.fused.stream_launch import MOST_ROWS, StreamLaunch, linear_launch


def test_what_was_not_measured_is_left_to_cublas() -> None:
    assert linear_launch(1, 17, 19, 2) is None


def test_the_first_launch_that_serves_the_rows_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    few, more = StreamLaunch(32, 128), StreamLaunch(64, 128)
    monkeypatch.setattr(stream_launch, "MEASURED", {(96, 64, 2): ((4, few), (16, more))})
    assert [linear_launch(m, 96, 64, 2) for m in (1, 4, 5, 16, 17)] == [
        *(few, few, more, more),
        None,
    ]
    assert linear_launch(1, 96, 64, 4) is None


def test_the_table_is_in_order_and_possible() -> None:
    entries_of_both = [*stream_launch.MEASURED.values(), *stream_launch.MEASURED_GATED.values()]
    assert entries_of_both
    for entries in entries_of_both:
        rows = [most for most, _ in entries]
        assert rows == sorted(set(rows)) and rows[-1] <= MOST_ROWS
        for _, launch in entries:
            for size in (launch.block_n, launch.block_k, launch.warps):
                assert size & (size - 1) == 0
