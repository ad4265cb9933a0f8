"""A batch is cut into parts that cover it in order, and only where that pays."""

from __future__ import annotations

from knockon.rollout.side_by_side import MAX_PARTS, batch_parts


def test_parts_cover_the_batch_in_order() -> None:
    for batch in range(1, 300):
        parts = batch_parts(batch, is_cuda=True)
        assert [b for part in parts for b in range(part.start, part.stop)] == list(range(batch))
        assert len(parts) <= MAX_PARTS
        assert len(parts) == 1 or all(part.stop - part.start >= 16 for part in parts)
        assert batch_parts(batch, is_cuda=False) == [slice(0, batch)]
