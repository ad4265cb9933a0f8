"""Which exchange of base logits a block takes: a pure choice, carried out elsewhere."""

from __future__ import annotations

from typing import Literal, cast

Exchange = Literal["full", "compact"]
EXCHANGES = ("auto", "full", "compact")


def choose_exchange(
    batch: int,
    gathered_bytes: int,
    in_graph: bool,
    pool_size: int,
    *,
    ranks: int = 2,
    requested: str = "auto",
    graph_full_batch: int = 1,
    eager_full_bytes: int = 96 << 20,
) -> Exchange:
    """The published rule: full gather while it is small, compact beyond.

    Args:
        batch: requests in the block.
        gathered_bytes: size of the base logits gathered from all ranks, in bytes.
        in_graph: whether the block runs inside a CUDA graph.
        pool_size: ``K``; 0 scores the whole vocabulary, which only the full exchange can serve.
        ranks: ranks in the group; one has nothing to exchange and takes ``full``.
        requested: ``"full"`` or ``"compact"`` to decide by hand (``K = 0`` still takes ``full``).
        graph_full_batch: largest batch that gathers in full inside a graph.
        eager_full_bytes: largest ``gathered_bytes`` that gathers in full outside one.
    """
    if pool_size == 0:
        return "full"
    if requested in ("full", "compact"):
        return cast(Exchange, requested)
    if ranks == 1:
        return "full"
    small = batch <= graph_full_batch if in_graph else gathered_bytes <= eager_full_bytes
    return "full" if small else "compact"
