"""The choice of tokens: Knockon's rollout over what vLLM holds of the target.

Everything that vLLM's two model runners share of the plugin is here; what a runner wants of it is
in ``speculator.py`` and ``proposer.py``.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import Tensor

from knockon.errors import Refused
from knockon.integrations.vllm.checkpoint import hold_to_target, read_checkpoint, tell_vllm
from knockon.integrations.vllm.group import GroupCoordinator, VllmGroup
from knockon.integrations.vllm.settings import PluginSettings
from knockon.integrations.vllm.versions import adapter_for, installed_version
from knockon.integrations.vllm.vocabulary import plain_weight, unwrapped, vocab_shard
from knockon.rollout import DominoRollout, FP8Head

logger = logging.getLogger("vllm.knockon")


def prepare(vllm_config: Any) -> PluginSettings:
    """What is to be known before vLLM builds its drafter, which reads the configuration then.

    Raises:
        Refused: a version, a checkpoint or an option that the plugin does not serve.
    """
    adapter = adapter_for(installed_version())
    settings = PluginSettings.from_environment(os.environ)
    speculative = vllm_config.speculative_config
    config = read_checkpoint(speculative.draft_model_config)
    hold_to_target(config, vllm_config.model_config, speculative)
    refuse_options(vllm_config)
    adapter.refuse(vllm_config, config)
    tell_vllm(config, speculative.draft_model_config)
    return settings


def refuse_options(vllm_config: Any) -> None:
    """Options of vLLM's that a chain of proposals cannot serve, under every version.

    Raises:
        Refused: naming the option.
    """
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    where = "speculative_config."
    if speculative.draft_sample_method != "greedy":
        raise Refused(
            f"{where}draft_sample_method",
            speculative.draft_sample_method,
            "'greedy': a chain is proposed, not a distribution, for sampled requests too",
        )
    if speculative.use_local_argmax_reduction:
        raise Refused(
            f"{where}use_local_argmax_reduction",
            True,
            "False: KNOCKON_VLLM_EXCHANGE says how ranks exchange logits",
        )
    drafted, target = speculative.draft_tensor_parallel_size, parallel.tensor_parallel_size
    if drafted not in (None, target):
        raise Refused(
            f"{where}draft_tensor_parallel_size", drafted, f"the target's {target}, or none"
        )
    if parallel.pipeline_parallel_size > 1:
        raise Refused(
            "pipeline_parallel_size",
            parallel.pipeline_parallel_size,
            "1: the drafter borrows the embedding, which another stage holds",
        )


def build_rollout(
    model: Any, coordinator: GroupCoordinator, settings: PluginSettings
) -> DominoRollout:
    """The rollout over a loaded drafter that shares the target's embedding and LM head.

    All ranks construct together. vLLM counts what is allocated here, the gate table and an FP8
    head, as weights, since it is built while models are loaded.

    Args:
        model: a :class:`~knockon.integrations.vllm.model.DominoDraftModel`.

    Raises:
        Refused: an LM head with a bias or a scale, an embedding without a plain weight, shards that
            are not dealt alike, or what :class:`~knockon.rollout.DominoRollout` refuses.
    """
    group = VllmGroup(coordinator)
    head, embedding = unwrapped(model.lm_head), unwrapped(model.model.embed_tokens)
    shard = vocab_shard(head, "target lm_head", group.rank, group.size)
    held = vocab_shard(embedding, "target embedding", group.rank, group.size)
    if (held.start, held.num_org) != (shard.start, shard.num_org):
        raise Refused(
            "target embedding: ids held",
            (held.start, held.stop),
            f"the LM head's {(shard.start, shard.stop)}",
        )
    if getattr(head, "bias", None) is not None:
        raise Refused("target lm_head", "a bias", "none")
    scale = getattr(model.logits_processor, "scale", 1.0)
    if scale != 1.0:
        raise Refused("logit_scale", scale, "1.0")

    def logits(rows: Tensor) -> Tensor:
        """This rank's, by vLLM's own head, whatever it is quantised to."""
        product: Tensor = head.quant_method.apply(head, rows)
        return product

    proposing = (
        FP8Head(plain_weight(head, "target lm_head")) if settings.draft_head == "fp8" else logits
    )
    rollout = DominoRollout(
        model.domino.head(),
        plain_weight(embedding, "target embedding")[: held.num_org],
        proposing,
        shard,
        group,
        pool_size=settings.pool_size,
        exchange=settings.exchange,
        sharded_embedding=group.size > 1,
        implementation=settings.rollout,
    )
    if group.rank == 0:
        logger.info(
            "Domino drafts: pool %d, exchange %s, rollout %s%s, draft head %s, gate table %.0f MiB",
            rollout.pool_size,
            rollout.exchange,
            rollout.implementation,
            f" ({rollout.why_plain})" if rollout.why_plain else "",
            settings.draft_head,
            rollout.gate_table_bytes / (1 << 20),
        )
    return rollout


@torch.inference_mode()
def choose(
    rollout: DominoRollout, rows: Tensor, ids: Tensor, steps: int, in_graph: bool | None = None
) -> Tensor:
    """The proposals ``[B, steps]`` of ``B`` drafted blocks.

    Args:
        rows: the drafter's output, ``steps + 1`` rows a block, and perhaps padding: ``[>= N, H]``
            with ``N = B * (steps + 1)``.
        ids: what went in, ``[N]``: each block's bonus token, then masks.
    """
    block = steps + 1
    hidden = rows[: len(ids)].view(-1, block, rows.shape[-1])
    return rollout(hidden, ids[::block], steps, in_graph=in_graph)
