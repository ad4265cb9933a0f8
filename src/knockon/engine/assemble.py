"""From settings to a loaded engine, on every rank alike."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from knockon.drafters.backbone import BackboneConfig
from knockon.drafters.base import Drafter
from knockon.drafters.config import DraftConfig
from knockon.drafters.load import load_drafter, read_draft_config
from knockon.engine.config import EngineConfig, check_verify_width, default_verify_width
from knockon.engine.defaults import choose_dtype
from knockon.engine.engine import Engine
from knockon.engine.hardware import detect
from knockon.engine.memory import KVBudget, plan_kv
from knockon.engine.rank_zero_width import RankZeroWidth
from knockon.engine.runner import ModelRunner
from knockon.engine.width import AUTO, AdaptiveWidth, FixedWidth, WidthPolicy, auto_widths
from knockon.layers.attention import SdpaBackend
from knockon.models.catalog import resolve
from knockon.models.target import POSITION_SLACK, Target, load_target, read_config
from knockon.models.tokenizer import load_tokenizer
from knockon.parallel import Group, HeadShard

logger = logging.getLogger(__name__)


def check(config: EngineConfig) -> EngineConfig:
    """Everything that can be refused without loading a weight; names become paths.

    Called once, before ranks are started.

    Raises:
        Refused: names that resolve to nothing, a drafter made for another model, heads that cannot
            be dealt to ``tp_size`` ranks, a verify width above the block size.
    """
    model = resolve(config.model)
    target = read_config(model)
    for rank in range(config.tp_size):
        HeadShard.deal(target.num_heads, target.num_kv_heads, config.tp_size, rank)
    draft = None
    if config.draft is not None:
        draft = resolve(config.draft, "draft")
        drafter = read_draft_config(draft)
        drafter.check_target(target)
        for rank in range(config.tp_size):
            HeadShard.deal(
                drafter.backbone.num_heads, drafter.backbone.num_kv_heads, config.tp_size, rank
            )
        if isinstance(config.verify_width, int):
            check_verify_width(config.verify_width, drafter.block_size)
    dtype = choose_dtype(detect()).value if config.dtype == "auto" else config.dtype
    return config.replace(model=str(model), draft=str(draft) if draft else None, dtype=dtype)


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
    draft_config: DraftConfig | None = None
    if config.draft is not None:
        draft_config = read_draft_config(Path(config.draft))
        limit = min(limit, draft_config.backbone.max_positions)
        widths = _widths(config, draft_config.block_size)
        block_rows = max(*widths, draft_config.block_size)
    # Before the weights: a model without a tokenizer is refused at once.
    tokenizer = load_tokenizer(model)
    positions = min(config.max_model_len or limit, limit) + max(POSITION_SLACK, block_rows)
    target = load_target(model, dtype, group, config.device, positions)
    target.pack()
    drafter: Drafter | None = None
    if config.draft is not None and widths[-1] > 1:
        drafter = load_drafter(
            Path(config.draft),
            target,
            SdpaBackend(),
            config.max_model_len or limit,
            config.speculative_domino_candidate_pool_size,
            config.speculative_domino_exchange,
        )
    drafted = draft_config.backbone if drafter is not None and draft_config is not None else None
    budget = _kv_budget(config, target, drafted, limit, block_rows, group)
    runner = ModelRunner(target, drafter, budget.num_pages, config.page_size)
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
        max_batch_size=config.max_batch_size,
        prefill_chunk=config.prefill_chunk,
        max_length=budget.max_length,
        widths=_width_policy(config, widths, group),
        prefix_cache=config.prefix_cache,
    )


def _widths(config: EngineConfig, block_size: int) -> tuple[int, ...]:
    """Every width that steps may verify, ascending."""
    if config.verify_width == AUTO:
        return auto_widths(block_size)
    if isinstance(config.verify_width, int):
        return (config.verify_width,)
    return (default_verify_width(block_size, config.device),)


def _width_policy(config: EngineConfig, widths: tuple[int, ...], group: Group) -> WidthPolicy:
    if config.verify_width != AUTO:
        return FixedWidth(widths[0])
    policy = AdaptiveWidth(widths)
    return policy if group.size == 1 else RankZeroWidth(policy, group, config.device)


def _kv_budget(
    config: EngineConfig,
    target: Target,
    drafted: BackboneConfig | None,
    limit: int,
    block_rows: int,
    group: Group,
) -> KVBudget:
    """Pages for target and draft KV together: the least that any rank can afford.

    Every rank plans with the largest share of heads, target's and drafter's, so all come to the
    same number and schedule alike.
    """
    element = torch.finfo(target.dtype).bits // 8
    layers, _, dim = target.kv_shape
    most = HeadShard.deal(target.config.num_heads, target.config.num_kv_heads, group.size, 0)
    per_position = layers * most.kv_count * dim
    if drafted is not None:
        most = HeadShard.deal(drafted.num_heads, drafted.num_kv_heads, group.size, 0)
        per_position += drafted.num_layers * most.kv_count * drafted.head_dim
    return plan_kv(
        config.kv_memory // group.size,
        2 * element * per_position,
        config.page_size,
        config.max_batch_size,
        block_rows,
        limit,
        config.max_model_len,
    )
