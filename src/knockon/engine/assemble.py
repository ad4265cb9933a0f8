"""From settings to a loaded engine, on every rank alike."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from knockon.drafters.base import Drafter, DraftSizes
from knockon.drafters.config import DraftConfig
from knockon.drafters.load import load_drafter, read_draft_config
from knockon.drafters.mtp_config import MTPConfig
from knockon.engine.config import EngineConfig, check_verify_width, default_verify_width
from knockon.engine.defaults import (
    Sizes,
    choose_attention,
    choose_device,
    choose_dtype,
    default_sizes,
)
from knockon.engine.engine import Engine
from knockon.engine.flight import Runner
from knockon.engine.graphs import default_buckets
from knockon.engine.hardware import detect
from knockon.engine.memory import KVBudget, free_for_kv, least_of, measure_workspace, plan_kv
from knockon.engine.pipelined import PipelinedRunner
from knockon.engine.rank_zero_width import RankZeroWidth
from knockon.engine.runner import ModelRunner
from knockon.engine.speculate import Accept, accept_drawn
from knockon.engine.width import AUTO, AdaptiveWidth, FixedWidth, WidthPolicy, auto_widths
from knockon.errors import Refused
from knockon.layers.attention import PagedBackend, SdpaBackend
from knockon.models.catalog import resolve
from knockon.models.config import ModelConfig
from knockon.models.target import POSITION_SLACK, Target, load_target, read_config
from knockon.models.tokenizer import load_tokenizer
from knockon.parallel import Group, HeadShard
from knockon.rollout.fp8_head import MULTIPLE, fp8_obstacle

logger = logging.getLogger(__name__)


def check(config: EngineConfig) -> EngineConfig:
    """Everything that can be refused without loading a weight; names become paths.

    Called once, before ranks are started.

    Raises:
        Refused: names that resolve to nothing, a drafter made for another model, heads that cannot
            be dealt to ``tp_size`` ranks, a verify width above the block size, an FP8 draft head
            where there can be none.
    """
    model = resolve(config.model)
    target = read_config(model)
    for rank in range(config.tp_size):
        HeadShard.deal(target.num_heads, target.num_kv_heads, config.tp_size, rank)
    draft = None
    if config.drafts:
        draft = model if config.draft is None else resolve(config.draft, "draft")
        drafter = read_draft_config(draft)
        drafter.check_target(target)
        _check_algorithm(config, drafter)
        for rank in range(config.tp_size):
            HeadShard.deal(
                drafter.sizes.num_heads, drafter.sizes.num_kv_heads, config.tp_size, rank
            )
        if isinstance(config.verify_width, int):
            check_verify_width(config.verify_width, block_size_of(config, drafter))
    settled = settle(config)
    if settled.speculative_draft_head_dtype == "fp8":
        _check_fp8_head(settled, target)
    return settled.replace(model=str(model), draft=str(draft) if draft else None)


def block_size_of(config: EngineConfig, drafter: DraftConfig | MTPConfig) -> int:
    """Positions that can be verified at a time; an MTP head is unrolled as far as is asked."""
    return config.mtp_steps() + 1 if isinstance(drafter, MTPConfig) else drafter.block_size


def _check_algorithm(config: EngineConfig, drafter: DraftConfig | MTPConfig) -> None:
    """Hold what is asked for to what the drafter is."""
    kind = "MTP" if isinstance(drafter, MTPConfig) else "DFLASH"
    if config.speculative_algorithm not in (None, kind):
        wanted = f"{kind}, which the draft is"
        raise Refused("speculative_algorithm", config.speculative_algorithm, wanted)
    if config.speculative_num_steps is not None and kind != "MTP":
        hint = "A block drafter proposes verify_width - 1 tokens."
        raise Refused("speculative_num_steps", config.speculative_num_steps, "none", hint)


def settle(config: EngineConfig) -> EngineConfig:
    """Put what this machine is best served with where nothing was asked for.

    Raises:
        Refused: a device that is not there, or fewer GPUs than ranks; kernels that cannot run.
    """
    machine = detect()
    device = choose_device(machine).value if config.device == "auto" else config.device
    if device == "cuda":
        if not machine.gpus:
            raise Refused("device", "cuda", "cpu or auto: torch sees no CUDA device")
        if config.tp_size > len(machine.gpus):
            raise Refused("tp_size", config.tp_size, f"at most the {len(machine.gpus)} GPUs here")
    else:
        machine = dataclasses.replace(machine, gpus=())
    dtype = choose_dtype(machine).value if config.dtype == "auto" else config.dtype
    attention = choose_attention(machine)
    if config.attention_backend == "triton" and (attention.value != "triton" or dtype == "float64"):
        raise Refused(
            "attention_backend",
            "triton",
            "torch or auto",
            "FP64 has no kernels." if attention.value == "triton" else f"{attention.why}.",
        )
    backend = config.attention_backend
    if backend == "auto":
        backend = "torch" if dtype == "float64" else attention.value
    sizes = default_sizes(device)
    return config.replace(
        device=device,
        dtype=dtype,
        attention_backend=backend,
        max_batch_size=config.max_batch_size or sizes.max_batch_size,
        prefill_chunk=config.prefill_chunk or sizes.prefill_chunk,
        kv_memory=config.kv_memory or sizes.kv_memory,
        overlap_schedule=(
            backend == "triton" if config.overlap_schedule is None else config.overlap_schedule
        ),
        cuda_graph=config.cuda_graph and backend == "triton",
    )


def _check_fp8_head(config: EngineConfig, target: ModelConfig) -> None:
    """Refuse an FP8 head that the dtype, the device or the model's width cannot have."""
    field = "speculative_draft_head_dtype"
    if config.dtype == "float64":
        raise Refused(field, "fp8", "auto where dtype is float64")
    obstacle = fp8_obstacle(torch.device(config.device))
    if obstacle:
        raise Refused(field, "fp8", "auto on this device", obstacle)
    if target.hidden_size % MULTIPLE:
        wanted = f"auto where hidden_size, {target.hidden_size}, is no multiple of {MULTIPLE}"
        raise Refused(field, "fp8", wanted)


def build_engine(config: EngineConfig, group: Group) -> Engine:
    """Load models onto this rank and make its engine.

    Args:
        config: as :func:`check` returns it.
        group: the ranks that share the model.

    Raises:
        Refused: weights that do not fit, or memory that does not suffice.
    """
    model = Path(config.model)
    dtype: torch.dtype = getattr(torch, config.dtype)
    target_config = read_config(model)
    limit = target_config.max_positions
    block_rows = 1
    widths: tuple[int, ...] = (1,)
    draft_config: DraftConfig | MTPConfig | None = None
    if config.draft is not None:
        draft_config = read_draft_config(Path(config.draft))
        limit = min(limit, draft_config.max_positions)
        block_size = block_size_of(config, draft_config)
        widths = widths_of(config, block_size, whole=isinstance(draft_config, MTPConfig))
        block_rows = max(*widths, block_size)
    # Before the weights: a model without a tokenizer is refused at once.
    tokenizer = load_tokenizer(model)
    positions = min(config.max_model_len or limit, limit) + max(POSITION_SLACK, 3 * block_rows)
    device = this_device(config.device, group)
    target = load_target(model, dtype, group, device, positions)
    attention = PagedBackend() if config.attention_backend == "triton" else SdpaBackend()
    target.attention = attention
    target.pack()
    drafter: Drafter | None = None
    if config.draft is not None and widths[-1] > 1:
        drafter = load_drafter(
            Path(config.draft),
            target,
            attention,
            config.max_model_len or limit,
            config.speculative_domino_candidate_pool_size,
            config.speculative_domino_exchange,
            config.speculative_draft_head_dtype,
            config.mtp_steps(),
        )
    drafted = draft_config.sizes if drafter is not None and draft_config is not None else None
    runner, budget = build_runner(
        config, target, drafter, drafted, limit, block_rows, widths, group
    )
    logger.info(
        "%s: %d positions of KV in %d pages, %.0f MiB a rank; context %d; verify width %s",
        model.name,
        (budget.num_pages - 1) * config.page_size,
        budget.num_pages,
        budget.bytes / (1 << 20),
        budget.max_length,
        ", ".join(map(str, widths)),
    )
    return Engine(
        runner,
        tokenizer,
        num_pages=budget.num_pages,
        max_batch_size=config.max_batch_size or default_sizes(config.device).max_batch_size,
        prefill_chunk=config.prefill_chunk or default_sizes(config.device).prefill_chunk,
        max_length=budget.max_length,
        widths=width_policy(config, widths, runner, group),
        prefix_cache=config.prefix_cache,
    )


def widths_of(config: EngineConfig, block_size: int, whole: bool = False) -> tuple[int, ...]:
    """Every width that steps may verify, ascending; ``whole`` blocks where nothing is asked."""
    if config.verify_width == AUTO:
        return auto_widths(block_size)
    if isinstance(config.verify_width, int):
        return (config.verify_width,)
    return (block_size if whole else default_verify_width(block_size, config.device),)


def width_policy(
    config: EngineConfig, widths: tuple[int, ...], runner: Runner, group: Group
) -> WidthPolicy:
    """The policy asked for; an adaptive one knows the times of the graphs there are."""
    if config.verify_width != AUTO:
        return FixedWidth(widths[0])
    policy = AdaptiveWidth(widths)
    if isinstance(runner, PipelinedRunner) and runner.graphs.count:
        policy = AdaptiveWidth(widths, runner.buckets, runner.time_graphs())
    if group.size == 1:
        return policy
    return RankZeroWidth(policy, group, this_device(config.device, group))


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
        Refused: KV memory that does not suffice.
    """
    # Where cuBLAS splits a product over its columns, the parts are added up in FP32: sums decide
    # tokens. (Settings of the process; on a CPU nothing reads them.)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    sizes = default_sizes(config.device)
    batch = config.max_batch_size or sizes.max_batch_size
    chunk = config.prefill_chunk or sizes.prefill_chunk
    per_position = _bytes_per_position(target, drafted, group)

    def plan(memory: int) -> KVBudget:
        return plan_kv(
            memory, per_position, config.page_size, batch, block_rows, limit, config.max_model_len
        )

    if not config.overlap_schedule:
        budget = plan(_asked_memory(config, sizes) // group.size)
        pages, size = budget.num_pages, config.page_size
        return ModelRunner(target, drafter, pages, size, accept), budget
    longest = min(config.max_model_len or limit, limit)
    runner = PipelinedRunner(
        target,
        drafter,
        config.page_size,
        batch,
        longest + 3 * block_rows,
        default_buckets(batch) if config.cuda_graph else (),
        accept,
        chunk if config.cuda_graph else 0,
    )
    if config.kv_memory is None and config.device == "cuda":
        workspace = measure_workspace(runner, min(chunk, longest), widths[-1])
        free = free_for_kv(target.device, config.mem_fraction_static, workspace)
        budget = plan(least_of(free, group, target.device))
    else:
        budget = plan(_asked_memory(config, sizes) // group.size)
    runner.allocate(budget.num_pages)
    if config.cuda_graph:
        runner.capture(widths)
        logger.info("captured %d graphs in %.1f s", runner.graphs.count, runner.graphs.seconds)
    return runner, budget


def _asked_memory(config: EngineConfig, sizes: Sizes) -> int:
    memory = config.kv_memory or sizes.kv_memory
    if memory is None:
        raise Refused("kv_memory", None, "a number of bytes without overlap_schedule on a GPU")
    return memory


def _bytes_per_position(target: Target, drafted: DraftSizes | None, group: Group) -> int:
    """Target and draft KV of one position on the rank with the largest share of heads.

    So all ranks come to the same number of pages, and schedule alike.
    """
    element = torch.finfo(target.dtype).bits // 8
    layers, _, dim = target.kv_shape
    most = HeadShard.deal(target.config.num_heads, target.config.num_kv_heads, group.size, 0)
    per_position = 2 * layers * most.kv_count * dim
    if drafted is not None:
        most = HeadShard.deal(drafted.num_heads, drafted.num_kv_heads, group.size, 0)
        per_position += 2 * drafted.num_layers * most.kv_count * drafted.head_dim
        per_position += drafted.kept_per_position
    return element * per_position
