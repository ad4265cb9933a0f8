"""The feedback loop of a block in one launch: pool sums, argmax, GRU cell, correction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from knockon.rollout.fused.chain_resident_kernel import chain_resident
from knockon.rollout.fused.chain_tiled_kernel import chain_tiled
from knockon.rollout.head import DominoHead
from knockon.triton_backend import power_of_two


@dataclass(frozen=True)
class ChainWeights:
    """What the loop reads in every step, all of one dtype (BF16, FP16 or FP32).

    Attributes:
        table: input gates of every id ``[V, 3G]``.
        stacked: ``W_hh`` and, below it, the columns of ``W1`` that read the state ``[3G + E, G]``.
        correction_out: ``W2 [V, E]``.
    """

    table: Tensor
    stacked: Tensor
    correction_out: Tensor

    @staticmethod
    def of(head: DominoHead, table: Tensor) -> ChainWeights:
        state_half = head.correction_in[:, head.hidden_size :]
        return ChainWeights(
            table, torch.cat((head.gru_state, state_half)), head.correction_out.contiguous()
        )

    def pool_rows(self) -> tuple[Tensor, bool]:
        """``W2`` as the kernels read it, and whether two BF16 weights share an int32."""
        rows = self.correction_out
        if rows.dtype == torch.bfloat16 and rows.shape[1] % 2 == 0:
            return rows.view(torch.int32), True
        return rows, False


@dataclass(frozen=True)
class PoolBase:
    """Base logits of the pool's ids.

    Attributes:
        logits: ``[T - p, B, K]``; or, where ``indexed``, all of this one rank's ``[T, B, N]``,
            read at the pool's ids.
        indexed: which of both.
    """

    logits: Tensor
    indexed: bool


@dataclass(frozen=True)
class ResidentLaunch:
    """How the kernel for small batches is laid out on the device."""

    programs: int
    warps: int
    chunk: int


@dataclass(frozen=True)
class TiledLaunch:
    """How the kernel for larger batches is laid out on the device."""

    programs: int
    warps: int
    requests: int
    block: int
    stages: int
    pool_rows: int


@dataclass(frozen=True)
class Device:
    """What a launch depends on. The defaults are an H100's and H200's."""

    processors: int = 132
    shared_bytes: int = 232_448


@lru_cache
def device_of(device: torch.device) -> Device:
    """A CUDA device's sizes; elsewhere one processor, since programs run in turn."""
    if device.type != "cuda":
        return Device(processors=1)
    found = torch.cuda.get_device_properties(device)
    # What a program may ask for; builds that do not tell give what it has without asking.
    shared = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    return Device(found.multi_processor_count, shared)


def choose_launch(
    batch: int, gru: int, correction: int, weight_bytes: int, device: Device
) -> ResidentLaunch | TiledLaunch:
    """Which kernel takes a batch, and how: from sizes and the device alone, never from timings.

    Args:
        batch: requests.
        gru: ``G``.
        correction: ``E``.
        weight_bytes: size of a weight; those of two bytes meet a state in three BF16 parts.
        device: where.
    """
    programs = power_of_two(device.processors + 1) // 2
    columns = own_columns(gru, correction, programs)
    # What a program may keep of the weights: half its processor's registers, as FP32.
    if batch <= 2 and columns * power_of_two(gru) <= 32 * 1024:
        return ResidentLaunch(programs, 8, chunk=16)
    requests = min(64, max(16, power_of_two(batch)))
    # Up to 16 requests the whole product of a step is in flight at once.
    block, stages = (512, 2) if requests == 16 else (128, 4)
    turn_bytes = requests * (6 if weight_bytes == 2 else 4) + columns * weight_bytes
    while (room := (device.shared_bytes - 2048) // (turn_bytes * block)) < 2 and block > 16:
        block //= 2
    return TiledLaunch(programs, 4, requests, block, max(1, min(stages, room)), pool_rows=128)


def own_columns(gru: int, correction: int, programs: int) -> int:
    """Rows of ``stacked`` that a program owns, as a power of two: its units' gates and hidden."""
    units, hidden = own_units(gru, correction, programs)
    return max(16, power_of_two(3 * units + hidden))


def own_units(gru: int, correction: int, programs: int) -> tuple[int, int]:
    """GRU units and correction units that a program owns, each as a power of two."""
    return power_of_two(-(-gru // programs)), power_of_two(-(-correction // programs))


def run_chain(
    weights: ChainWeights,
    draft_part: Tensor,
    bonus: Tensor,
    tokens: Tensor,
    pool_ids: Tensor,
    base: PoolBase,
    prefix: int,
    launch: ResidentLaunch | TiledLaunch | None = None,
) -> None:
    """Fill ``tokens[:, p:]``: ``d_j = argmax (base_j + c_j)`` over the pool, the lowest id of ties.

    Args:
        draft_part: the ``z`` half of ``W1 · [z ; s]`` for the corrected rows,
            ``[T - p, B, E]`` FP32.
        bonus: ``[B]`` int64.
        tokens: ``[B, T]`` int64 with the ``p`` prefix tokens filled in, ``0 <= p < T``.
        pool_ids: ``[B, K]`` int32, in any order.
        base: the pool's base logits.
        prefix: ``p``.
        launch: by default :func:`choose_launch`'s.
    """
    batch = len(pool_ids)
    launch = launch or choose_launch(
        batch,
        weights.table.shape[1] // 3,
        weights.correction_out.shape[1],
        weights.stacked.element_size(),
        device_of(tokens.device),
    )
    # Each request of a launch has a program of its own at least.
    for first in range(0, batch, launch.programs):
        some = slice(first, first + launch.programs)
        part = (
            weights,
            draft_part[:, some].contiguous(),
            bonus[some].contiguous(),
            tokens[some],
            pool_ids[some],
            PoolBase(base.logits[:, some], base.indexed),
            prefix,
        )
        if isinstance(launch, ResidentLaunch):
            _run_resident(*part, launch)
        else:
            _run_tiled(*part, launch)


def _run_resident(
    weights: ChainWeights,
    draft_part: Tensor,
    bonus: Tensor,
    tokens: Tensor,
    pool_ids: Tensor,
    base: PoolBase,
    prefix: int,
    launch: ResidentLaunch,
) -> None:
    batch, pool = pool_ids.shape
    steps = tokens.shape[1]
    gru, correction = weights.table.shape[1] // 3, weights.correction_out.shape[1]
    pool_rows, packed = weights.pool_rows()
    units, hidden_units = own_units(gru, correction, launch.programs)
    padded = power_of_two(batch)
    per = launch.programs // padded
    rows = power_of_two(-(-pool // per))
    threads = 32 * launch.warps
    columns = max(threads, power_of_two(correction))
    sizes = [steps * batch * gru, steps * batch * correction, steps * launch.programs]
    boxes = torch.zeros(sum(sizes), dtype=torch.int64, device=tokens.device)
    state_box, hidden_box, best_box = boxes.split(sizes)
    st_gates = torch.empty(batch * 3 * gru, dtype=torch.float32, device=tokens.device)
    chain_resident[(launch.programs,)](
        weights.table,
        weights.stacked,
        pool_rows,
        draft_part,
        bonus,
        tokens,
        pool_ids,
        base.logits,
        state_box,
        hidden_box,
        best_box,
        st_gates,
        batch,
        pool,
        steps,
        prefix,
        base.logits.stride(0),
        base.logits.stride(1),
        G=gru,
        E=correction,
        G_BLOCK=max(threads, power_of_two(gru)),
        E_BLOCK=columns,
        WIDTH=pool_rows.shape[1],
        WIDTH_BLOCK=columns // 2 if packed else columns,
        BATCH=padded,
        PER=per,
        PER_BLOCK=max(per, threads // padded),
        UNITS=units,
        HIDDEN=hidden_units,
        ROWS=rows,
        CHUNK=min(rows, launch.chunk),
        INDEXED=base.indexed,
        PACKED=packed,
        num_warps=launch.warps,
        launch_cooperative_grid=launch.programs > 1,
    )


def _run_tiled(
    weights: ChainWeights,
    draft_part: Tensor,
    bonus: Tensor,
    tokens: Tensor,
    pool_ids: Tensor,
    base: PoolBase,
    prefix: int,
    launch: TiledLaunch,
) -> None:
    batch, pool = pool_ids.shape
    steps = tokens.shape[1]
    gru, correction = weights.table.shape[1] // 3, weights.correction_out.shape[1]
    pool_rows, packed = weights.pool_rows()
    per = launch.programs // power_of_two(batch)
    units, hidden_units = own_units(gru, correction, launch.programs)
    columns = own_columns(gru, correction, launch.programs)
    share = -(-pool // per)
    tile = min(launch.pool_rows, power_of_two(share))
    words = torch.zeros(steps * batch + 1, dtype=torch.int64, device=tokens.device)
    sizes = [batch * gru, launch.programs * batch * columns, batch * correction]
    scratch = torch.empty(sum(sizes), dtype=torch.float32, device=tokens.device)
    states, own_gates, hidden = scratch.split(sizes)
    # Triton's interpreter, the only one to run this off a GPU, has no BF16 product.
    split = weights.stacked.dtype == torch.bfloat16 and tokens.is_cuda
    shared = torch.empty(
        (2, 3 if split else 1, batch, gru),
        dtype=torch.bfloat16 if split else torch.float32,
        device=tokens.device,
    )
    chain_tiled[(launch.programs,)](
        weights.table,
        weights.stacked,
        pool_rows,
        draft_part,
        bonus,
        tokens,
        pool_ids,
        base.logits,
        states,
        shared,
        own_gates,
        hidden,
        words[1:],
        words[:1].view(torch.int32),
        batch,
        pool,
        steps,
        prefix,
        base.logits.stride(0),
        base.logits.stride(1),
        -(-share // tile),
        gru,
        G=gru,
        E=correction,
        WIDTH=pool_rows.shape[1],
        WIDTH_BLOCK=power_of_two(pool_rows.shape[1]),
        PROGRAMS=launch.programs,
        PER=per,
        UNITS=units,
        HIDDEN=hidden_units,
        M=launch.requests,
        N=columns,
        BLOCK=launch.block,
        STAGES=launch.stages,
        POOL_ROWS=tile,
        INDEXED=base.indexed,
        SPLIT=split,
        PACKED=packed,
        num_warps=launch.warps,
        launch_cooperative_grid=launch.programs > 1,
    )
