"""How many states of recurrent layers are held, for whom, and what they take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from knockon.engine.config import EngineConfig
from knockon.engine.hardware import available_memory
from knockon.errors import Refused
from knockon.models.qwen3_5_config import DeltaConfig
from knockon.models.target import Target
from knockon.parallel import Group, HeadShard


@dataclass(frozen=True)
class StateBudget:
    """States of all recurrent layers; one state is what they keep of one request.

    Attributes:
        requests: one for each request computed at once, by its slot; they come first.
        idle: one more that stands for nothing, where batches are filled up with idle requests.
        checkpoints: kept at page boundaries for later prompts; they lie behind those.
        dtype: what states are kept in.
        bytes: what all take, on the rank with the largest share.
        held_bytes: what a step keeps of the rows it verifies until it is known which of them stand.
    """

    requests: int
    idle: int
    checkpoints: int
    dtype: torch.dtype
    bytes: int
    held_bytes: int

    @property
    def states(self) -> int:
        """How many there are in all."""
        return self.first_checkpoint + self.checkpoints

    @property
    def first_checkpoint(self) -> int:
        """Slot of the first checkpoint."""
        return self.requests + self.idle


def plan_states(
    config: EngineConfig, target: Target, max_batch_size: int, width: int
) -> StateBudget | None:
    """The states that a settled ``config`` asks for; ``None`` where the target keeps none.

    Args:
        width: the largest verify width.

    Raises:
        Refused: fewer states than requests computed at once, or more than memory holds.
    """
    delta = target.config.delta
    if delta is None:
        return None
    asked = config.max_mamba_cache_size
    refuse_too_few(asked, max_batch_size)
    kept = max_batch_size if asked is None else asked - max_batch_size
    checkpoints = kept if config.prefix_cache else 0
    wide = torch.promote_types(target.dtype, torch.float32)
    idle = int(bool(config.overlap_schedule))
    named = config.mamba_ssm_dtype
    dtype: torch.dtype = wide if named == "auto" else getattr(torch, named)
    one, row = _bytes(delta, dtype, wide, target.dtype, target.group)
    states, room = max_batch_size + idle + checkpoints, available_memory(target.device)
    if states * one > room:
        wanted = f"at most {room // one - idle}: a state takes {one} bytes, {room} are available"
        raise Refused("max_mamba_cache_size", states - idle, wanted)
    return StateBudget(
        requests=max_batch_size,
        idle=idle,
        checkpoints=checkpoints,
        dtype=dtype,
        bytes=states * one,
        held_bytes=max_batch_size * width * row if width > 1 else 0,
    )


def refuse_too_few(asked: int | None, max_batch_size: int) -> None:
    """Hold what was asked for to the requests computed at once.

    Raises:
        Refused: fewer states than those.
    """
    if asked is not None and asked < max_batch_size:
        wanted = f"at least {max_batch_size}, one for each request computed at once"
        hint = "max_batch_size (of a server, --max-running-requests) sets their number."
        raise Refused("max_mamba_cache_size", asked, wanted, hint)


def _bytes(
    delta: DeltaConfig, kept: torch.dtype, wide: torch.dtype, dtype: torch.dtype, group: Group
) -> tuple[int, int]:
    """Of one state, and of one verified row, on the rank with the largest share."""
    most = HeadShard.deal(delta.num_value_heads, delta.num_key_heads, group.size, 0)
    keys, values = most.kv_count * delta.key_dim, most.head_count * delta.value_dim
    channels = 2 * keys + values
    state = values * delta.key_dim * kept.itemsize
    before = (delta.conv_width - 1) * channels * dtype.itemsize
    # A held block reads the convolution's inputs where the projection left them, gates beside them.
    projected = channels + values + 2 * most.head_count
    row = (keys + values + most.head_count) * wide.itemsize + projected * dtype.itemsize
    layers = sum(delta.layers)
    return layers * (state + before), layers * row
