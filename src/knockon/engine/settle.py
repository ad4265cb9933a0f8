"""Settings checked and completed for this machine, before a weight is loaded."""

from __future__ import annotations

import dataclasses
import logging

import torch

from knockon.drafters.config import DraftConfig
from knockon.drafters.load import is_folder_with_mtp, read_draft_config
from knockon.drafters.mtp_config import MTPConfig
from knockon.engine.config import EngineConfig, check_verify_width
from knockon.engine.defaults import (
    Sizes,
    choose_attention,
    choose_device,
    choose_dtype,
    choose_linear_attention,
    default_sizes,
    linear_attention_obstacle,
)
from knockon.engine.hardware import Hardware, detect
from knockon.engine.state_memory import refuse_too_few
from knockon.errors import Refused
from knockon.layers.fla_chunks import import_rule
from knockon.models.catalog import resolve
from knockon.models.config import ModelConfig
from knockon.models.target import read_config
from knockon.parallel import HeadShard
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
        if config.draft is None and not is_folder_with_mtp(model):
            raise Refused(
                "speculative_algorithm",
                "MTP",
                "a draft beside it, or a target folder that brings an MTP head",
                f"{model.name} has none.",
            )
        drafter = read_draft_config(draft)
        drafter.check_target(target)
        _check_algorithm(config, drafter)
        for rank in range(config.tp_size):
            HeadShard.deal(
                drafter.sizes.num_heads, drafter.sizes.num_kv_heads, config.tp_size, rank
            )
        if isinstance(config.verify_width, int):
            check_verify_width(config.verify_width, block_size_of(config, drafter))
    settled = settle(_pass_over(config, target))
    if config.linear_attn_backend == "auto" and target.delta is not None:
        settled = fall_back_from_fla(settled)
    _check_states(settled, target)
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
    linear = _settle_linear_attention(config.linear_attn_backend, machine, dtype)
    config = config.replace(
        device=device, dtype=dtype, attention_backend=backend, linear_attn_backend=linear
    )
    sizes = sizes_of(config)
    graphs = config.cuda_graph and backend == "triton"
    most = min(config.cuda_graph_max_bs or sizes.max_batch_size, sizes.max_batch_size)
    return config.replace(
        **dataclasses.asdict(sizes),
        overlap_schedule=(
            backend == "triton" if config.overlap_schedule is None else config.overlap_schedule
        ),
        cuda_graph=graphs,
        cuda_graph_max_bs=most if graphs else None,
    )


def _settle_linear_attention(asked: str, machine: Hardware, dtype: str) -> str:
    if asked == "auto":
        return choose_linear_attention(machine, dtype).value
    obstacle = linear_attention_obstacle(machine, dtype) if asked == "fla" else ""
    if obstacle:
        raise Refused("linear_attn_backend", asked, "torch or auto", f"{obstacle}.")
    return asked


def fall_back_from_fla(settled: EngineConfig) -> EngineConfig:
    """PyTorch's prompts where a package that nobody asked for cannot be imported after all."""
    if settled.linear_attn_backend != "fla":
        return settled
    try:
        import_rule()
    except Refused as refused:
        logger.warning("prompts go through recurrent layers in PyTorch: %s", refused.hint)
        return settled.replace(linear_attn_backend="torch")
    return settled


def _pass_over(config: EngineConfig, target: ModelConfig) -> EngineConfig:
    """Say so where settings of recurrent layers mean nothing; a launch line may be for several."""
    if target.delta is not None:
        return config
    settings = ("max_mamba_cache_size", "mamba_ssm_dtype", "linear_attn_backend")
    asked = [name for name in settings if getattr(config, name) not in (None, "auto")]
    if asked:
        logger.warning(
            "%s: no meaning here and passed over, the target has no recurrent layers",
            ", ".join(asked),
        )
    return config.replace(linear_attn_backend="torch")


def _check_states(config: EngineConfig, target: ModelConfig) -> None:
    """Hold recurrent layers' heads to the ranks, and their states to the requests."""
    delta = target.delta
    if delta is None:
        return
    refuse_too_few(config.max_mamba_cache_size, sizes_of(config).max_batch_size)
    for rank in range(config.tp_size):
        HeadShard.deal(delta.num_value_heads, delta.num_key_heads, config.tp_size, rank)


def sizes_of(config: EngineConfig) -> Sizes:
    """What was asked for, and the device's own where nothing was; the device is settled."""
    default = default_sizes(config.device)
    return Sizes(
        config.max_batch_size or default.max_batch_size,
        config.prefill_chunk or default.prefill_chunk,
        config.kv_memory or default.kv_memory,
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
