"""From settings to a loaded engine, on every rank alike."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

from knockon.drafters.base import Drafter
from knockon.drafters.config import DraftConfig
from knockon.drafters.load import load_drafter, read_draft_config
from knockon.drafters.mtp_config import MTPConfig
from knockon.engine.build_runner import build_runner, this_device
from knockon.engine.config import EngineConfig, default_verify_width
from knockon.engine.engine import Engine
from knockon.engine.flight import Runner
from knockon.engine.graphs import default_buckets
from knockon.engine.pipelined import PipelinedRunner
from knockon.engine.rank_zero_width import RankZeroWidth
from knockon.engine.settle import block_size_of, sizes_of
from knockon.engine.width import AUTO, AdaptiveWidth, FixedWidth, WidthPolicy, auto_widths
from knockon.layers.attention import PagedBackend, SdpaBackend
from knockon.models.target import POSITION_SLACK, load_target, read_config
from knockon.models.tokenizer import load_tokenizer
from knockon.parallel import Group

logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig, group: Group) -> Engine:
    """Load models onto this rank and make its engine.

    Args:
        config: as :func:`~knockon.engine.settle.check` returns it.
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
    done = _Stages()
    tokenizer = load_tokenizer(model)
    done("tokenizer read")
    positions = min(config.max_model_len or limit, limit) + max(POSITION_SLACK, 3 * block_rows)
    device = this_device(config.device, group)
    torch.empty(1, device=device)  # a GPU's context is made at its first use
    done("device ready")
    target = load_target(model, dtype, group, device, positions)
    attention = PagedBackend() if config.attention_backend == "triton" else SdpaBackend()
    target.attention = attention
    target.pack()
    done("target's weights read")
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
        done("drafter loaded")
    drafted = draft_config.sizes if drafter is not None and draft_config is not None else None
    runner, budget = build_runner(
        config, target, drafter, drafted, limit, block_rows, widths, group
    )
    done("pages and graphs made")
    logger.info(
        "%s: %d positions of KV in %d pages, %.0f MiB a rank; context %d; verify width %s",
        model.name,
        (budget.num_pages - 1) * config.page_size,
        budget.num_pages - 1,
        budget.bytes / (1 << 20),
        budget.max_length,
        ", ".join(map(str, widths)),
    )
    if budget.states is not None:
        states = budget.states
        logger.info(
            "%s: %d states of recurrent layers in %s, %.0f MiB a rank beside the pages: %d for "
            "requests, %d checkpoints of the prefix cache%s; %.1f MiB for blocks being verified",
            model.name,
            states.states,
            str(states.dtype).removeprefix("torch."),
            states.bytes / (1 << 20),
            states.requests,
            states.checkpoints,
            "" if states.checkpoints else ", which is off",
            states.held_bytes / (1 << 20),
        )
    sizes = sizes_of(config)
    return Engine(
        runner,
        tokenizer,
        num_pages=budget.num_pages,
        max_batch_size=sizes.max_batch_size,
        prefill_chunk=sizes.prefill_chunk,
        max_length=budget.max_length,
        widths=width_policy(config, widths, runner, group),
        prefix_cache=config.prefix_cache,
        states=budget.states,
    )


class _Stages:
    """Tells how long each part of a start took."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def __call__(self, what: str) -> None:
        now = time.perf_counter()
        logger.info("%s: %.1f s", what, now - self._began)
        self._began = now


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
    if isinstance(runner, PipelinedRunner) and runner.graphs.count:
        # Batches beyond the largest graph are timed apart: they run eagerly.
        every = default_buckets(sizes_of(config).max_batch_size)
        beyond = [bucket for bucket in every if bucket > runner.buckets[-1]]
        policy = AdaptiveWidth(widths, (*runner.buckets, *beyond), runner.time_graphs())
    else:
        policy = AdaptiveWidth(widths)
    if group.size == 1:
        return policy
    return RankZeroWidth(policy, group)
