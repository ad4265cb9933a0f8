"""From base logits to a rank's prefix tokens and pool offers, in three launches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from knockon.errors import Refused
from knockon.rollout.fused.keys import key_dtype, padding_key
from knockon.rollout.fused.list_kernel import choose_listed, list_groups
from knockon.rollout.fused.select_kernels import finish_rows, scan_rows
from knockon.rollout.fused.select_launch import SelectLaunch, select_launch
from knockon.rollout.fused.select_plain import select_plain
from knockon.rollout.fused.selected import Selected
from knockon.triton_backend import power_of_two, runs_on

# The kernels note which rows hold a NaN in the bits of one int64.
MOST_ROWS = 63


def select(
    local: Tensor, num_org: int, start: int, prefix: int, k: int, nan_rows: Tensor
) -> Selected:
    """The best token of each prefix row, and the ``min(k, N)`` best ids of the corrected rows.

    An id's score is the best of its logits over the rows from ``prefix``; equal scores go to the
    lowest id. Nothing is read back to the host and no shape or launch depends on data.

    Args:
        local: this rank's base logits ``[T, B, N]`` in BF16, FP16 or FP32, rows contiguous,
            ``B >= 1``, ``N = num_padded >= 1``.
        num_org: how many of the ``N`` are ids; the rest is padding, never read as a number.
        start: id of the first.
        prefix: rows, from the first, that are not corrected, ``0 <= prefix <= T``. With
            ``prefix == T`` there is no pool (``[B, 0]``).
        k: pool size, at least 1.
        nan_rows: int64 scalar on the device; the number of rows with a NaN is added to it.

    Returns:
        The prefix rows' tokens and the pool's offers, ids ascending. Offers past ``num_org`` are
        sentinels, the lowest rows of padding.

    Raises:
        Refused: logits of another dtype.
    """
    if runs_on(local) and local.shape[0] <= MOST_ROWS and local.stride(-1) == 1:
        return select_kernel(local, num_org, start, prefix, k, nan_rows)
    return select_plain(local, num_org, start, prefix, k, nan_rows)


def select_kernel(
    local: Tensor,
    num_org: int,
    start: int,
    prefix: int,
    k: int,
    nan_rows: Tensor,
    launch: SelectLaunch | None = None,
) -> Selected:
    """:func:`select` by the kernels, on a GPU or in Triton's interpreter."""
    rows, batch, width = local.shape
    if rows > MOST_ROWS:
        raise Refused("rows", rows, f"at most {MOST_ROWS} for the kernels")
    pool = min(k, width) if prefix < rows else 0
    if launch is None:
        launch = select_launch(batch, width, max(1, pool))
    scanned = scan(local, num_org, prefix, launch)
    if not pool:
        return finish(scanned, start, nan_rows)
    lists = list_candidates(scanned, pool, launch)
    return choose(scanned, lists, start, pool, nan_rows, launch)


class Scanned(NamedTuple):
    """What one reading of the logits leaves: see :func:`scan_rows`."""

    scores: Tensor
    group_best: Tensor
    row_best: Tensor
    row_best_at: Tensor
    nan_masks: Tensor
    rows: int
    padding: int

    def settings(self) -> dict[str, int]:
        """Compile-time sizes of what follows."""
        return {
            "PADDING": self.padding,
            "ROWS": self.rows,
            "PREFIX": self.row_best.shape[1],
            "CHUNKS": power_of_two(self.nan_masks.shape[1]),
        }


class Lists(NamedTuple):
    """Candidates for the pool, ``[B, parts, capacity]``, and how many, ``[B, parts]``."""

    keys: Tensor
    ids: Tensor
    counts: Tensor


def scan(local: Tensor, num_org: int, prefix: int, launch: SelectLaunch) -> Scanned:
    """Read the logits once."""
    rows, batch, width = local.shape
    chunks = -(-width // launch.block)
    per_chunk = launch.block if prefix < rows else 0
    key_type = key_dtype(local.dtype)
    new = local.new_empty
    scanned = Scanned(
        scores=new((batch, chunks * per_chunk), dtype=key_type),
        group_best=new((batch, chunks * per_chunk // launch.group), dtype=key_type),
        row_best=new((batch, prefix, chunks), dtype=torch.int32),
        row_best_at=new((batch, prefix, chunks), dtype=torch.int32),
        nan_masks=new((batch, chunks), dtype=torch.int64),
        rows=rows,
        padding=padding_key(local.dtype),
    )
    scan_rows[(chunks, batch)](
        local,
        *scanned[:5],
        local.stride(0),
        local.stride(1),
        # A bound that is a multiple of 16 lets whole vectors be loaded under the mask.
        min(-(-num_org // 16) * 16, width),
        num_org,
        PADDING=scanned.padding,
        ROWS=rows,
        PREFIX=prefix,
        GROUP=launch.group,
        BLOCK=launch.block,
        num_warps=launch.scan_warps,
    )
    return scanned


def finish(scanned: Scanned, start: int, nan_rows: Tensor) -> Selected:
    """Without corrected rows: the prefix rows' tokens alone."""
    batch, prefix, chunks = scanned.row_best.shape
    new = scanned.row_best.new_empty
    found = Selected(new((batch, prefix)), new((batch, prefix)), new((batch, 0)), new((batch, 0)))
    finish_rows[(batch,)](*scanned[2:5], *found[:2], nan_rows, chunks, start, **scanned.settings())
    return found


def list_candidates(scanned: Scanned, pool: int, launch: SelectLaunch) -> Lists:
    """The lists that hold every winner."""
    batch, groups = scanned.group_best.shape
    new = scanned.row_best.new_empty
    most_groups = power_of_two(groups)
    parts = min(launch.parts, most_groups)
    slice_groups = most_groups // parts
    # A multiple of 16 lets whole vectors be loaded.
    capacity = -(-slice_groups * launch.group // 16) * 16
    lists = Lists(
        keys=new((batch, parts, capacity), dtype=scanned.scores.dtype),
        ids=new((batch, parts, capacity)),
        counts=new((batch, parts)),
    )
    list_groups[(batch, parts)](
        *scanned[:2],
        new((batch, parts, slice_groups)),
        *lists,
        groups,
        pool,
        capacity,
        PARTS=parts,
        GROUP=launch.group,
        GROUPS=most_groups,
        TILE=launch.list_tile,
        num_warps=launch.list_warps,
    )
    return lists


def choose(
    scanned: Scanned,
    lists: Lists,
    start: int,
    pool: int,
    nan_rows: Tensor,
    launch: SelectLaunch,
) -> Selected:
    """The pool out of the lists; the prefix rows' tokens beside it."""
    batch, parts, capacity = lists.keys.shape
    _, prefix, chunks = scanned.row_best.shape
    prefix_keys, prefix_ids = lists.ids.new_empty((2, batch, prefix))
    keys, ids = lists.ids.new_empty((2, batch, pool))
    choose_listed[(batch, parts + 1)](
        *lists,
        *scanned[2:5],
        keys,
        ids,
        prefix_keys,
        prefix_ids,
        nan_rows,
        pool,
        capacity,
        chunks,
        start,
        **scanned.settings(),
        PARTS=parts,
        TILE=max(launch.best_tile, parts),
        STRIDE=cutoff_stride(lists.keys.dtype),
        num_warps=launch.best_warps,
    )
    return Selected(prefix_keys, prefix_ids, keys, ids)


def cutoff_stride(keys: torch.dtype) -> int:
    """First step of the search for the cutoff, which lies a little above the lists' lowest key."""
    return 4 if keys == torch.int16 else 4 << 16
