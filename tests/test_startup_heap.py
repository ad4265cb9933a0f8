"""Collections pass over what start-up has made."""

from __future__ import annotations

import gc
import weakref

from knockon.startup_heap import keep_startup_objects


class Node:
    """Of a cycle that only a collection can free."""

    def __init__(self) -> None:
        self.self = self


def test_garbage_goes_first_and_what_is_left_is_kept() -> None:
    before, kept = weakref.ref(Node()), Node()
    still = weakref.ref(kept)
    assert before() is not None
    try:
        count = keep_startup_objects()
        assert before() is None
        assert count > 1000
        del kept
        later = weakref.ref(Node())
        gc.collect()
        assert still() is not None and later() is None
    finally:
        gc.unfreeze()
    gc.collect()
    assert still() is None
