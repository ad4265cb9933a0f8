"""What start-up has made, out of the garbage collector's way, in processes that serve."""

from __future__ import annotations

import gc


def keep_startup_objects() -> int:
    """Let collections pass over all that exists: modules, models, graphs stay as long as this does.

    A collection of every generation walks through all objects, and with torch and transformers
    imported that is a pause of a tenth of a second, in the middle of everybody's answers. For a
    process of our own, once it is ready: what has become garbage by then is collected first, and
    what becomes it later is kept.

    Returns:
        How many objects are kept.
    """
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()
