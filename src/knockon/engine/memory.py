"""How many KV pages the memory given holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from knockon.engine.state_memory import StateBudget
from knockon.errors import Refused
from knockon.parallel import Group

if TYPE_CHECKING:
    from knockon.engine.pipelined import PipelinedRunner

# For what libraries and compiled kernels take once they run.
_MARGIN = 1 << 30


@dataclass(frozen=True)
class KVBudget:
    """KV pages of one rank and the context they leave room for.

    Attributes:
        num_pages: pages in all, the null page included.
        max_length: positions that a request may reach.
        bytes: what target and draft KV take together on this rank.
        states: of recurrent layers, which lie beside the pages; ``None`` without such layers.
    """

    num_pages: int
    max_length: int
    bytes: int
    states: StateBudget | None = None


def plan_kv(
    memory: int,
    bytes_per_position: int,
    page_size: int,
    max_batch_size: int,
    block_rows: int,
    context_limit: int,
    asked_length: int | None,
) -> KVBudget:
    """Share out ``memory`` bytes of this rank.

    Args:
        bytes_per_position: target and draft KV of one position on this rank.
        block_rows: positions that a step may write past a request's length.
        context_limit: what the model was made for.
        asked_length: ``max_model_len`` as asked for.

    Raises:
        Refused: a ``max_model_len`` above the model's limit, or more than the memory holds.
    """
    if asked_length is not None and asked_length > context_limit:
        raise Refused("max_model_len", asked_length, f"at most the model's {context_limit}")
    affordable = memory // (bytes_per_position * page_size)
    wanted = asked_length or context_limit
    full = max_batch_size * -(-(wanted + block_rows) // page_size) + 1
    num_pages = min(affordable, full)
    room = (num_pages - 1) * page_size - block_rows
    if room < 2 or (asked_length is not None and room < asked_length):
        raise Refused(
            "kv_memory",
            memory,
            f"at least {bytes_per_position * (wanted + block_rows + 2 * page_size)} bytes a rank "
            f"for a context of {wanted} positions",
        )
    return KVBudget(num_pages, min(wanted, room), num_pages * page_size * bytes_per_position)


def measure_workspace(runner: PipelinedRunner, requests: int, rows: int, width: int) -> int:
    """Bytes that the largest prefill and the largest step take beside weights and KV.

    Args:
        runner: without KV yet.
        requests, rows: of the largest prefill.
        width: the verify width.
    """
    device = runner.device
    runner.allocate(1)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.rehearse(requests, rows, width)
    torch.cuda.synchronize(device)
    workspace = torch.cuda.max_memory_allocated(device) - before
    runner.allocate(0)
    torch.cuda.empty_cache()
    return workspace


def free_for_kv(device: torch.device, fraction: float, workspace: int) -> int:
    """Bytes for KV on a GPU: weights and KV in ``fraction`` of it, the workspace beside them.

    What other processes hold counts as taken, not as this one's weights: several that start at once
    each come to their own share, whoever is first. The workspace is counted twice: prefill runs
    eagerly, and graphs hold memory of their own.
    """
    free, total = torch.cuda.mem_get_info(device)
    static = int(total * fraction) - torch.cuda.memory_reserved(device)
    return max(0, min(static, free - 2 * workspace - _MARGIN))


def least_of(memory: int, group: Group, device: torch.device) -> int:
    """The least of every rank's ``memory``, so that all hold the same number of pages."""
    if group.size == 1:
        return memory
    own = torch.tensor([memory], device=device)
    found = own.new_empty((group.size, 1))
    group.all_gather(found, own)
    return int(found.min())
