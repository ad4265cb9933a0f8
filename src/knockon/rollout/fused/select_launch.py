"""How the kernels of pool selection are launched: a pure function of sizes."""

from __future__ import annotations

from dataclasses import dataclass

from knockon.rollout.fused.backend import power_of_two

# The groups' bests stay in the registers of one program.
_MOST_GROUPS = 8192
# `places` counts in 16 bits.
_MOST_ENTRIES = 32768


@dataclass(frozen=True)
class SelectLaunch:
    """Launch settings of one selection.

    Attributes:
        block: ids per program of ``scan_rows``. scan_warps: its warps.
        group: neighbouring ids whose best bounds the cutoff.
        parts: programs a request of ``list_groups``. list_tile: groups at a time in each.
            list_warps: its warps.
        best_tile: entries of the lists that ``choose_best`` keeps in registers.
            best_warps: its warps.
    """

    block: int
    scan_warps: int
    group: int
    parts: int
    list_tile: int
    list_warps: int
    best_tile: int
    best_warps: int


def select_launch(batch: int, width: int, k: int) -> SelectLaunch:
    """Settings for ``batch`` requests over ``width`` ids each."""
    block = min(2048, max(64, power_of_two(width)))
    group = max(8, power_of_two(-(-width // _MOST_GROUPS)))
    block = max(block, group)
    parts = min(16, power_of_two(max(1, 128 // batch)))
    parts = max(2, parts)
    best_tile, best_warps = best_launch(4 * k)
    return SelectLaunch(
        block=block,
        scan_warps=max(1, min(8, block // 256)),
        group=group,
        parts=min(parts, best_tile),
        list_tile=max(1, min(power_of_two(-(-k // parts)), 4096 // group)),
        list_warps=16,
        best_tile=best_tile,
        best_warps=best_warps,
    )


def best_launch(entries: int) -> tuple[int, int]:
    """Entries kept in registers and warps of ``choose_best`` for lists of about ``entries``."""
    tile = min(_MOST_ENTRIES // 2, max(64, power_of_two(entries)))
    return tile, max(1, min(16, tile // 128))
