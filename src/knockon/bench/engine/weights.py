"""Random weights of a shape, made where they are used; no checkpoint is written or read."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from knockon.drafters.backbone import DFlashBackbone
from knockon.drafters.base import Drafter
from knockon.drafters.config import DominoConfig, DraftConfig
from knockon.drafters.dflash import DFlashDrafter
from knockon.drafters.domino import DominoDrafter
from knockon.drafters.load import head_shapes
from knockon.drafters.proposing_head import ProposingHead
from knockon.models.config import ModelConfig
from knockon.models.decoder import Decoder
from knockon.models.target import LAYERS
from knockon.parallel import SingleRank
from knockon.rollout import DominoHead, DominoRollout, FP8Head

STD = 0.02  # what language models are initialised with: nothing overflows, nothing is constant


def random_target(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, max_positions: int, seed: int
) -> Decoder:
    """A target of that shape, packed for inference.

    Args:
        max_positions: rows of the rotary tables.
    """
    target = bare_target(config, dtype, device, max_positions)
    fill(target, torch.Generator(device).manual_seed(seed))
    target.pack()
    return target


def target_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What the weights of a target of that shape take."""
    target = bare_target(config, dtype, torch.device("meta"), 1)
    return sum(weight.nbytes for weight in target.parameters())


def bare_target(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, max_positions: int
) -> Decoder:
    """A target whose weights hold nothing yet."""
    layer = LAYERS[config.architecture]
    return Decoder(config, layer, dtype, SingleRank(), max_positions, device)


def random_drafter(
    config: DraftConfig,
    target: Decoder,
    max_positions: int,
    pool_size: int,
    seed: int,
    head_dtype: str = "auto",
) -> Drafter:
    """A DFlash drafter for ``target``, or Domino where the configuration has a head.

    Args:
        max_positions: positions that requests may reach.
        pool_size: Domino's ``K``.
        head_dtype: ``"fp8"`` proposes with a copy of the target's LM head.
    """
    generator = torch.Generator(target.device).manual_seed(seed)
    with torch.device(target.device):
        backbone = DFlashBackbone(config.backbone, target.dtype, target.group)
    fill(backbone, generator)
    backbone.prepare()
    fp8_head = FP8Head(target.lm_head.weight) if head_dtype == "fp8" else None
    proposing = ProposingHead(target, fp8_head)
    drafter = DFlashDrafter(config, backbone, target, target.attention, max_positions, proposing)
    if config.domino is None:
        return drafter
    rollout = DominoRollout(
        _random_head(config, config.domino, target.dtype, generator),
        target.embedding.weight,
        fp8_head or target.lm_head.local,
        target.vocab_shard,
        target.group,
        pool_size=pool_size,
    )
    return DominoDrafter(drafter, rollout)


@torch.no_grad()
def fill(module: nn.Module, generator: torch.Generator) -> None:
    """Normal values in every matrix, ones in every norm, zeros in every bias."""
    for name, parameter in module.named_parameters():
        if "norm" in name:
            parameter.fill_(1)
        elif parameter.dim() < 2:
            parameter.zero_()
        else:
            parameter.normal_(0, STD, generator=generator)


def _random_head(
    config: DraftConfig, domino: DominoConfig, dtype: torch.dtype, generator: torch.Generator
) -> DominoHead:
    def normal(name: str) -> Tensor:
        empty = torch.empty(shapes[name], dtype=dtype, device=generator.device)
        return empty.normal_(0, STD, generator=generator)

    shapes = head_shapes(domino, config.backbone.hidden_size, config.vocab_size)
    return DominoHead(
        gru_input=normal("prefix_gru.weight_ih_l0"),
        gru_state=normal("prefix_gru.weight_hh_l0"),
        correction_in=normal("embed_proj.0.weight"),
        correction_out=normal("embed_proj.2.weight"),
        prefix_len=domino.prefix_len,
        shift_label=domino.shift_label,
    )
