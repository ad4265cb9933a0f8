"""The runner that settings ask for: its KV allocated, its graphs captured."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import torch

from knockon.drafters.base import Drafter, DraftSizes
from knockon.engine.config import EngineConfig
from knockon.engine.defaults import Sizes
from knockon.engine.flight import Runner
from knockon.engine.graphs import default_buckets
from knockon.engine.memory import KVBudget, free_for_kv, least_of, measure_workspace, plan_kv
from knockon.engine.pipelined import PipelinedRunner
from knockon.engine.runner import ModelRunner
from knockon.engine.settle import sizes_of
from knockon.engine.speculate import Accept, accept_drawn
from knockon.engine.state_memory import plan_states
from knockon.errors import Refused
from knockon.layers.attention.base import FP8
from knockon.layers.delta_rule import delta_chunks
from knockon.layers.fla_chunks import FlaChunks
from knockon.models.target import Target
from knockon.parallel import Group, HeadShard

logger = logging.getLogger(__name__)


def this_device(device: str, group: Group) -> torch.device:
    """The device of this rank: on GPUs, the one of its number."""
    return torch.device(device, group.rank) if device == "cuda" else torch.device(device)


def build_runner(
    config: EngineConfig,
    target: Target,
    drafter: Drafter | None,
    drafted: DraftSizes | None,
    limit: int,
    block_rows: int,
    widths: Sequence[int],
    group: Group,
    accept: Accept = accept_drawn,
) -> tuple[Runner, KVBudget]:
    """The runner that a settled ``config`` asks for, its KV allocated and its graphs captured.

    Args:
        drafted: sizes of the drafter, if there is one.
        limit: positions that target and drafter were made for.
        block_rows: positions that a step may write past a request's length.
        widths: every verify width that a step may have, ascending.
        accept: see :class:`~knockon.engine.speculate.Engines`.

    Raises:
        Refused: KV memory that does not suffice, or fewer states than requests; kernels for
            prompts that cannot be imported.
    """
    # Where cuBLAS splits a product over its columns, the parts are added up in FP32: sums decide
    # tokens. (Settings of the process; on a CPU nothing reads them.)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    target.kv_dtype = FP8 if config.kv_cache_dtype == "fp8_e4m3" else target.dtype
    if target.config.delta is not None:
        by_kernels = config.linear_attn_backend == "fla"
        target.prefill_by(FlaChunks(target.dtype) if by_kernels else delta_chunks)
    sizes = sizes_of(config)
    batch, chunk = sizes.max_batch_size, sizes.prefill_chunk
    per_position = _bytes_per_position(target, drafted, group)

    states = plan_states(config, target, batch, widths[-1])

    def plan(memory: int) -> KVBudget:
        budget = plan_kv(
            memory, per_position, config.page_size, batch, block_rows, limit, config.max_model_len
        )
        return dataclasses.replace(budget, states=states)

    if not config.overlap_schedule:
        budget = plan(_asked_memory(sizes) // group.size)
        pages, size = budget.num_pages, config.page_size
        return ModelRunner(target, drafter, pages, size, accept, states), budget
    longest = min(config.max_model_len or limit, limit)
    runner = PipelinedRunner(
        target,
        drafter,
        config.page_size,
        batch,
        longest + 3 * block_rows,
        default_buckets(min(config.cuda_graph_max_bs or batch, batch)) if config.cuda_graph else (),
        accept,
        most_prefill_rows(config, chunk, recurrent=states is not None),
        states,
    )
    if config.kv_memory is None and config.device == "cuda":
        # Prompts that come together fill a chunk where one alone cannot.
        rows = min(chunk, longest)
        workspace = measure_workspace(runner, min(chunk // rows, batch), rows, widths[-1])
        # The states of recurrent layers are allocated by now, and what is held in the workspace.
        free = free_for_kv(target.device, config.mem_fraction_static, workspace)
        budget = plan(least_of(free, group, target.device))
    else:
        budget = plan(_asked_memory(sizes) // group.size)
    runner.allocate(budget.num_pages)
    if config.cuda_graph:
        runner.capture(widths)
        logger.info("captured %d graphs in %.1f s", runner.graphs.count, runner.graphs.seconds)
    return runner, budget


def most_prefill_rows(config: EngineConfig, chunk: int, recurrent: bool) -> int:
    """Prompt tokens, over all requests, up to which a prefill may run as a graph; 0 for none.

    Where layers are recurrent a graph wants their chunk kernels: a few launches whatever a prompt's
    length, that read nothing back. In PyTorch it would hold a dozen nodes a chunk and layer, 18,000
    for 2048 rows of 48 layers, among them cuBLAS's batched triangular solver, of which nobody says
    that it may be captured.

    Args:
        config: settled.
        chunk: prompt tokens of a step.
    """
    if not config.cuda_graph or (recurrent and config.linear_attn_backend != "fla"):
        return 0
    return chunk


def _asked_memory(sizes: Sizes) -> int:
    if sizes.kv_memory is None:
        raise Refused("kv_memory", None, "a number of bytes without overlap_schedule on a GPU")
    return sizes.kv_memory


def _bytes_per_position(target: Target, drafted: DraftSizes | None, group: Group) -> int:
    """Target and draft KV of one position on the rank with the largest share of heads.

    So all ranks come to the same number of pages, and schedule alike.
    """
    element = target.dtype.itemsize
    layers, _, dim = target.kv_shape
    most = HeadShard.deal(target.config.num_heads, target.config.num_kv_heads, group.size, 0)
    target_bytes = target.kv_dtype.itemsize * 2 * layers * most.kv_count * dim
    per_position = 0
    if drafted is not None:
        most = HeadShard.deal(drafted.num_heads, drafted.num_kv_heads, group.size, 0)
        per_position = 2 * drafted.num_layers * most.kv_count * drafted.head_dim
        per_position += drafted.kept_per_position
    return target_bytes + element * per_position
