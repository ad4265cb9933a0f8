"""Load a published drafter onto its target, strictly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from knockon.drafters.backbone import DFlashBackbone
from knockon.drafters.base import Drafter
from knockon.drafters.config import DominoConfig, DraftConfig, parse_draft_config
from knockon.drafters.dflash import DFlashDrafter
from knockon.drafters.domino import DominoDrafter
from knockon.drafters.mtp import MTPDrafter, MTPHead
from knockon.drafters.mtp_config import MTPConfig, is_mtp, parse_mtp_config
from knockon.drafters.proposing_head import ProposingHead
from knockon.errors import Refused
from knockon.layers.attention import AttentionBackend
from knockon.models.json_file import read_json_object
from knockon.models.safetensors_source import SafetensorsFolder
from knockon.models.strict import load_strictly
from knockon.models.target import Target
from knockon.rollout import DominoHead, DominoRollout, FP8Head

logger = logging.getLogger(__name__)

# Publishers prefix everything with "model.", or put the head under "logit_head.".
CONTAINERS = ("model.", "logit_head.")
BORROWED = ("embed_tokens.weight", "lm_head.weight")


def read_draft_config(path: Path) -> DraftConfig | MTPConfig:
    """Parse ``config.json`` of a drafter's folder, or of a target's that brings an MTP head along.

    Raises:
        Refused: no such file, or a configuration that :func:`parse_draft_config` or
            :func:`~knockon.drafters.mtp_config.parse_mtp_config` refuses.
    """
    file = path / "config.json"
    if not file.is_file():
        raise Refused("draft", str(path), "a folder with config.json and *.safetensors")
    config = read_json_object(file)
    return parse_mtp_config(config) if is_mtp(config) else parse_draft_config(config)


def is_folder_with_mtp(path: Path) -> bool:
    """Whether a target's folder brings an MTP head of its own; a GGUF file never does."""
    file = path / "config.json"
    return file.is_file() and is_mtp(read_json_object(file))


def load_drafter(
    path: Path,
    target: Target,
    backend: AttentionBackend,
    max_positions: int,
    pool_size: int = 2048,
    exchange: str = "auto",
    head_dtype: str = "auto",
    mtp_steps: int = 1,
) -> Drafter:
    """Load the drafter in ``path`` for ``target``.

    Args:
        max_positions: positions that requests may reach (``max_model_len``).
        pool_size: Domino's candidate pool ``K``; 0 scores the whole vocabulary.
        exchange: ``"auto"``, ``"full"`` or ``"compact"``.
        head_dtype: of the LM head that proposes: ``"auto"`` for the target's own, or ``"fp8"`` for
            a copy made here.
        mtp_steps: proposals of an MTP head, whose checkpoint knows no number of them.

    Raises:
        Refused: a configuration or weights that do not fit the format or the target.
    """
    config = read_draft_config(path)
    config.check_target(target.config)
    config.check_context(max_positions)
    source = SafetensorsFolder(path)
    proposing = ProposingHead(target, _fp8_copy(target) if head_dtype == "fp8" else None)
    if isinstance(config, MTPConfig):
        head = load_mtp_head(source, config, target)
        return MTPDrafter(config, head, target, proposing, backend, mtp_steps, max_positions)
    return _load_block_drafter(
        source, config, target, proposing, backend, max_positions, pool_size, exchange
    )


def load_mtp_head(source: SafetensorsFolder, config: MTPConfig, target: Target) -> MTPHead:
    """An MTP head's weights: all of a folder of its own, or those of that name in the target's.

    Raises:
        Refused: weights missing, unused, doubled or of other shapes.
    """
    head = MTPHead(config, target.dtype, target.group)
    load_strictly(_OnlyMTP(source) if config.own else source, head.loaders(), prefixes=CONTAINERS)
    head.to(target.device)
    head.pack()
    return head


class _OnlyMTP:
    """The weights of a target's own MTP head."""

    def __init__(self, source: SafetensorsFolder) -> None:
        self.get = source.get
        self.describe = source.describe
        self._names = source.names

    def names(self) -> set[str]:
        found = {name for name in self._names() if name.removeprefix("model.").startswith("mtp.")}
        if not found:
            raise Refused(f"{self.describe()}: weights", "none of mtp.*", "the target's MTP head")
        return found


def _load_block_drafter(
    source: SafetensorsFolder,
    config: DraftConfig,
    target: Target,
    proposing: ProposingHead,
    backend: AttentionBackend,
    max_positions: int,
    pool_size: int,
    exchange: str,
) -> Drafter:
    own = sorted(n for n in source.names() if n.endswith(BORROWED))
    if own:
        raise Refused(
            f"{source.describe()}: weights", own, "none of these: a drafter borrows the target's"
        )
    backbone = DFlashBackbone(config.backbone, target.dtype, target.group)
    loaders: dict[str, Callable[[Tensor], None]] = dict(backbone.loaders())
    head: dict[str, Tensor] = {}
    if config.domino is not None:
        shapes = head_shapes(config.domino, config.backbone.hidden_size, config.vocab_size)
        for name, shape in shapes.items():
            loaders[name] = _taker(head, name, shape, target.dtype)
    load_strictly(source, loaders, prefixes=CONTAINERS)
    backbone.to(target.device)
    backbone.prepare()
    drafter = DFlashDrafter(config, backbone, target, backend, max_positions, proposing)
    if config.domino is None:
        return drafter
    domino_head = DominoHead(
        gru_input=head["prefix_gru.weight_ih_l0"].to(target.device),
        gru_state=head["prefix_gru.weight_hh_l0"].to(target.device),
        correction_in=head["embed_proj.0.weight"].to(target.device),
        correction_out=head["embed_proj.2.weight"].to(target.device),
        prefix_len=config.domino.prefix_len,
        shift_label=config.domino.shift_label,
    )
    rollout = DominoRollout(
        domino_head,
        target.embedding.weight,
        proposing.fp8 or target.lm_head.local,
        target.vocab_shard,
        target.group,
        pool_size=pool_size,
        exchange=exchange,
    )
    return DominoDrafter(drafter, rollout)


def head_shapes(domino: DominoConfig, hidden: int, vocab: int) -> dict[str, tuple[int, int]]:
    """The Domino head's weights and their shapes (spec page, "Checkpoint format")."""
    gru, correction = domino.gru_size, domino.correction_size
    return {
        "prefix_gru.weight_ih_l0": (3 * gru, hidden),
        "prefix_gru.weight_hh_l0": (3 * gru, gru),
        "embed_proj.0.weight": (correction, hidden + gru),
        "embed_proj.2.weight": (vocab, correction),
    }


def _fp8_copy(target: Target) -> FP8Head:
    head = FP8Head(target.lm_head.weight)
    logger.info(
        "LM head in FP8, for proposals only: %.0f MiB a rank beside the target's own%s",
        head.num_bytes / (1 << 20),
        "; a CPU multiplies it in FP32, slower than that" if head.device.type == "cpu" else "",
    )
    return head


def _taker(
    into: dict[str, Tensor], name: str, shape: tuple[int, int], dtype: torch.dtype
) -> Callable[[Tensor], None]:
    def take(full: Tensor) -> None:
        if tuple(full.shape) != shape:
            raise Refused("shape", tuple(full.shape), f"{shape}")
        into[name] = full.to(dtype)

    return take
