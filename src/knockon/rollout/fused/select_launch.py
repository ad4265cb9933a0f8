"""How the kernels of pool selection are launched: a pure function of sizes."""

from __future__ import annotations

from dataclasses import dataclass

from knockon.triton_backend import power_of_two

# The groups' bests stay in the registers of one program.
_MOST_GROUPS = 8192
# `places` counts in 16 bits.
_MOST_ENTRIES = 32768


@dataclass(frozen=True)
class SelectLaunch:
    """Launch settings of one selection, powers of two.

    Attributes:
        block: ids per program of ``scan_rows``. scan_warps: its warps.
        group: neighbouring ids whose best bounds the cutoff.
        parts: lists a request, each of one program of ``list_groups`` and of ``choose_listed``.
        list_tile: groups at a time in ``list_groups``. list_warps: its warps.
        best_tile: entries of the lists, of all parts together, that ``choose_listed`` keeps in
            registers. best_warps: its warps.
    """

    block: int
    scan_warps: int
    group: int
    parts: int
    list_tile: int
    list_warps: int
    best_tile: int
    best_warps: int


@dataclass(frozen=True)
class BestLaunch:
    """Launch settings of one merge, powers of two.

    Attributes:
        tile: entries, of all parts together, kept in registers. warps: of each program.
        parts: programs a request, each for a part of the output.
    """

    tile: int
    warps: int
    parts: int


def select_launch(batch: int, width: int, k: int) -> SelectLaunch:
    """Settings for ``batch`` requests over ``width`` ids each."""
    block = min(2048, max(64, power_of_two(width)))
    group = max(8, power_of_two(-(-width // _MOST_GROUPS)))
    block = max(block, group)
    groups = power_of_two(-(-width // block) * block // group)
    # As many programs as multiprocessors, for which a slice is small enough to be read whole.
    parts = min(32, max(1, groups // 32), max(2, power_of_two(128 // batch)))
    tile = min(_MOST_ENTRIES // 2, max(64, power_of_two(2 * k)))
    return SelectLaunch(
        block=block,
        scan_warps=max(1, min(8, block // 256)),
        group=group,
        parts=parts,
        list_tile=max(1, min(groups // parts, 16384 // group, 512)),
        list_warps=max(1, min(16, groups // 32)),
        best_tile=max(tile, parts),
        best_warps=max(1, min(8, tile // 256)),
    )


def best_launch(batch: int, entries: int) -> BestLaunch:
    """Settings for ``batch`` merges of ``entries`` each."""
    tile = min(_MOST_ENTRIES // 2, max(64, power_of_two(entries)))
    parts = min(8, tile // 64, max(1, power_of_two(128 // batch)))
    return BestLaunch(tile=tile, warps=max(1, min(8, tile // 256)), parts=parts)
