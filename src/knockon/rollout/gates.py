"""The GRU's input gates ``W_ih · embedding(token)``: from a table, or computed per step.

Taken once at construction into a ``[V, 3G]`` table, the gates cost one row read per step and, with
a sharded embedding, no collective inside a block. The table is rounded to the weights' dtype.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from knockon.errors import Refused
from knockon.parallel import Group
from knockon.rollout.head import DominoHead
from knockon.rollout.layout import VocabLayout

GateTableChoice = Literal["auto"] | bool


def choose_gate_table(
    choice: GateTableChoice, table_bytes: int, sharded: bool, *, auto_bytes: int = 2 << 30
) -> bool:
    """Whether to tabulate the input gates.

    Args:
        choice: ``True`` or ``False`` to decide by hand; ``"auto"`` tabulates up to ``auto_bytes``,
            and always where the embedding is sharded.
        table_bytes: ``V · 3G`` times the size of the weights' dtype.
        sharded: this rank holds only its shard of the embedding.

    Raises:
        Refused: anything but the three, 0 and 1 included, or ``False`` with a sharded embedding,
            which would need a collective in every step.
    """
    if not isinstance(choice, bool) and choice != "auto":  # 0 == False, but is neither
        raise Refused("gate_table", choice, '"auto", True or False')
    if choice is False and sharded:
        raise Refused(
            "gate_table",
            choice,
            "True or 'auto' where a rank holds only its shard of the embedding",
            f"The table takes {table_bytes} bytes; without it, pass the full embedding",
        )
    return choice if isinstance(choice, bool) else sharded or table_bytes <= auto_bytes


class TabulatedGates:
    """Input gates of every token in one table, ``[V, 3G]`` in the weights' dtype."""

    def __init__(self, table: Tensor, compute_dtype: torch.dtype) -> None:
        self.table = table
        self.compute_dtype = compute_dtype

    def __call__(self, token: Tensor) -> Tensor:
        """``token [B]`` to gates ``[B, 3G]`` in FP32 (FP64)."""
        # On a GPU index_select takes up to 16 rows one after another.
        rows = self.table[token] if token.is_cuda else self.table.index_select(0, token)
        return rows.to(self.compute_dtype)


class ComputedGates:
    """Input gates computed from the full embedding, in FP32 (FP64) throughout."""

    def __init__(self, head: DominoHead, embedding: Tensor) -> None:
        self.weight = head.gru_input.to(head.compute_dtype)
        self.embedding = embedding

    def __call__(self, token: Tensor) -> Tensor:
        """``token [B]`` to gates ``[B, 3G]``."""
        x = self.embedding.index_select(0, token).to(self.weight.dtype)
        return F.linear(x, self.weight)


def tabulate(
    head: DominoHead, own_rows: Tensor, layout: VocabLayout, group: Group, *, chunk: int = 16384
) -> Tensor:
    """The table ``[V, 3G]``, each rank computing its own ids' rows and gathering the others'.

    Every rank so holds the very same bits. ``chunk`` rows at a time bound the extra memory.

    Args:
        own_rows: this rank's rows of the embedding, ``[num_org, H]``.
    """
    shard = layout.shards[group.rank]
    gates = 3 * head.gru_size
    table = head.gru_input.new_empty((shard.vocab_size, gates))
    for first in range(0, shard.num_padded, chunk):
        rows = min(chunk, shard.num_padded - first)
        part = own_rows[first : first + rows]
        if part.dtype == head.dtype:
            mine = F.linear(part, head.gru_input)
        else:
            wide = head.compute_dtype
            mine = F.linear(part.to(wide), head.gru_input.to(wide)).to(head.dtype)
        if group.size == 1:
            table[first : first + len(mine)] = mine
            continue
        padded = mine.new_zeros((rows, gates))
        padded[: len(mine)] = mine
        gathered = mine.new_empty((group.size, rows, gates))
        group.all_gather(gathered, padded)
        for s in layout.shards:
            held = max(0, min(rows, s.num_org - first))
            table[s.start + first : s.start + first + held] = gathered[s.rank, :held]
    return table
