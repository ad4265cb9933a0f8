"""The real engine around models made of random weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from knockon.drafters.backbone import BackboneConfig
from knockon.drafters.base import Drafter
from knockon.engine.assemble import width_policy, widths_of
from knockon.engine.build_runner import build_runner
from knockon.engine.config import EngineConfig
from knockon.engine.engine import Engine
from knockon.engine.settle import fall_back_from_fla, settle, sizes_of
from knockon.engine.speculate import Accept, accept_drawn
from knockon.layers.attention import AttentionBackend, PagedBackend, SdpaBackend
from knockon.models.decoder import Decoder

_ALL_MEMORY = 1 << 50  # KV is bounded by what the requests can fill, not by a budget


class SilentTokenizer:
    """Stands for a tokenizer where requests are token ids and nobody reads the text."""

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        """No text for any tokens."""
        return ""


def choose_backend(device: str, dtype: str) -> AttentionBackend:
    """The attention that the engine would take where nothing is asked for."""
    config = settle(EngineConfig("random", device=device, dtype=dtype))
    return PagedBackend() if config.attention_backend == "triton" else SdpaBackend()


def assemble_engine(
    target: Decoder,
    drafter: Drafter | None,
    drafted: BackboneConfig | None,
    *,
    verify_width: int | str,
    max_batch_size: int,
    max_length: int,
    accept: Accept = accept_drawn,
) -> Engine:
    """An engine with KV for ``max_batch_size`` requests of ``max_length`` positions.

    All else is as ``EngineConfig`` has it where nothing is asked for: on a GPU whole steps are
    captured as graphs and launched ahead.

    Args:
        target: with the attention of :func:`choose_backend`.
        drafted: sizes of the drafter's backbone, if there is one.
        verify_width: as ``EngineConfig`` has it; 1 without a drafter.
    """
    block = drafter.block_size if drafter is not None else 1
    # Steps in flight reach further; no request ever waits for a page.
    positions = max_length + 4 * block
    config = settle(
        EngineConfig(
            "random",
            draft=None if drafter is None else "random",
            device=target.device.type,
            dtype=str(target.dtype).removeprefix("torch."),
            verify_width=verify_width,
            max_model_len=positions,
            max_batch_size=max_batch_size,
            kv_memory=_ALL_MEMORY,
            # No prompt is met twice: recurrent layers need no states but those of requests.
            max_mamba_cache_size=max_batch_size if target.config.delta is not None else None,
        )
    )
    if target.config.delta is not None:
        config = fall_back_from_fla(config)
    widths = widths_of(config, block)
    runner, budget = build_runner(
        config, target, drafter, drafted, positions, block, widths, target.group, accept
    )
    return Engine(
        runner,
        SilentTokenizer(),
        num_pages=budget.num_pages,
        max_batch_size=max_batch_size,
        prefill_chunk=sizes_of(config).prefill_chunk,
        max_length=budget.max_length,
        widths=width_policy(config, widths, runner, target.group),
        prefix_cache=config.prefix_cache,
        states=budget.states,
    )
