"""The candidate pool of base logits: scores over the corrected rows, then the best ``K`` ids."""

from __future__ import annotations

import torch
from torch import Tensor

from knockon.rollout import order

# Above so many scores in all, groups of ids are chosen first; below, one selection is quicker: on a
# GPU the two levels are some thirty small kernels more, on a CPU they cost next to nothing.
LARGE = {"cuda": 1 << 22, "cpu": 1 << 16}
GROUP = 16
# Rows of so many bytes are folded into one running maximum, a part of the batch at a time that
# leaves it in the cache; smaller ones by halves, in fewer passes.
_SMALL_ROW = 4 << 20
_CACHED = 16 << 20


def scores(
    rows: Tensor, num_org: int, *, small_row: int = _SMALL_ROW, cached: int = _CACHED
) -> Tensor:
    """``max_j base_j[v]`` of ``rows [T, B, N]`` in their own dtype: a fresh ``[B, N]``.

    NaN counts as no value: a score is NaN only where every row's is, and in the padding from
    ``num_org`` on, so that it loses to the ids before it.
    """
    steps, batch, width = rows.shape
    row_bytes = batch * width * rows.element_size()
    if steps == 1:
        best = rows[0].clone()
    elif not rows.is_cuda and rows.dtype != torch.float64:
        best = order.highest_of_rows(rows)
    elif row_bytes <= small_row:
        best = order.highest(rows, 0)
    else:
        best = torch.empty_like(rows[0])
        part = max(1, batch * cached // row_bytes)
        for first in range(0, batch, part):
            some = slice(first, first + part)
            running = torch.fmax(rows[0, some], rows[1, some], out=best[some])
            for row in rows[2:]:
                torch.fmax(running, row[some], out=running)
    if num_org < width:
        best[:, num_org:] = float("nan")
    return best


def choose(scored: Tensor, k: int, *, large: int | None = None) -> Tensor:
    """Positions of the ``k`` best of ``scored [B, N]``, ascending, ties to the lowest: int64.

    Of many scores, first the ``k`` best groups of neighbours are chosen by their best member, ties
    to the lowest group, and then the ``k`` best of their members. Nothing is lost: a member of
    another group is beaten by the best of each of those ``k``, by value, or by position where they
    tie, since groups are in the order of ids.
    """
    batch, n = scored.shape
    large = LARGE.get(scored.device.type, 0) if large is None else large
    if batch * n <= large or k * GROUP > n // 2:
        return order.best_positions(order.small_ranks(scored), k)
    if n % GROUP:
        scored = torch.nn.functional.pad(scored, (0, -n % GROUP), value=float("nan"))
    groups = scored.unflatten(-1, (-1, GROUP))
    group = choose(order.highest(groups, -1), k, large=large)
    members = groups.gather(1, group.unsqueeze(-1).expand(-1, -1, GROUP)).flatten(1)
    inside = order.best_positions(order.small_ranks(members), k)
    position = group.unsqueeze(-1) * GROUP + torch.arange(GROUP, device=scored.device)
    return position.flatten(1).gather(1, inside)
