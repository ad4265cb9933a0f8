"""Sizes of models and their Domino heads, by name or from a drafter's ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from knockon.errors import Refused


@dataclass(frozen=True)
class RolloutShape:
    """What the time of a rollout depends on, beside batch, ranks and precision.

    Attributes:
        vocab_size: ``V``.
        hidden_size: ``H``.
        gru_size: ``G``.
        correction_size: ``E``.
        block_size: ``L``.
        prefix_len: ``p``.
        shift_label: whether row ``k`` of the draft predicts the token at ``k + 1``.
    """

    name: str
    vocab_size: int
    hidden_size: int
    gru_size: int = 1024
    correction_size: int = 256
    block_size: int = 16
    prefix_len: int = 1
    shift_label: bool = False

    @property
    def max_steps(self) -> int:
        """The most proposals that a block has rows for."""
        return self.block_size - (0 if self.shift_label else 1)


# qwen3.5-4b is the target's V and H with the head of its published relatives.
SHAPES = {
    shape.name: shape
    for shape in (
        RolloutShape("qwen3.6-27b", 248320, 5120),
        RolloutShape("qwen3-8b", 151936, 4096, shift_label=True),
        RolloutShape("qwen3.5-4b", 248320, 2560),
        RolloutShape("tiny", 8192, 128, gru_size=64, correction_size=32),
    )
}


def find_shape(name: str) -> RolloutShape:
    """A shape by its name, or by the path of a Domino drafter's ``config.json`` or folder.

    Raises:
        Refused: neither a known name nor a path, or a configuration without a Domino head.
    """
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise Refused("shape", name, f"{', '.join(SHAPES)}, or the path of a drafter's config.json")
    from knockon.drafters.config import parse_draft_config
    from knockon.models.json_file import read_json_object

    config = parse_draft_config(read_json_object(file))
    if config.domino is None:
        raise Refused("shape", name, "a drafter with a Domino head; this one is plain DFlash")
    return RolloutShape(
        name=file.resolve().parent.name if file.name == "config.json" else file.stem,
        vocab_size=config.vocab_size,
        hidden_size=config.backbone.hidden_size,
        gru_size=config.domino.gru_size,
        correction_size=config.domino.correction_size,
        block_size=config.block_size,
        prefix_len=config.domino.prefix_len,
        shift_label=config.domino.shift_label,
    )
