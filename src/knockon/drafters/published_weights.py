"""A published drafter's weights as they come, sorted for an engine that loads the backbone itself.

Names and shapes are held to the same layers as Knockon's own loader; nothing is kept twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from knockon.drafters.backbone import DFlashBackbone
from knockon.drafters.config import DraftConfig
from knockon.drafters.load import BORROWED, CONTAINERS, head_shapes
from knockon.errors import Refused
from knockon.models.strict import load_strictly
from knockon.parallel import SingleRank


class PublishedWeights(NamedTuple):
    """Full checkpoint tensors by name, bare of containers.

    Attributes:
        backbone: ``fc``, the norms and the draft layers.
        head: the Domino head; empty for plain DFlash.
    """

    backbone: dict[str, Tensor]
    head: dict[str, Tensor]


def sort_published(
    weights: Iterable[tuple[str, Tensor]], config: DraftConfig, described: str
) -> PublishedWeights:
    """Sort ``(name, tensor)`` pairs of a checkpoint in the published format.

    Args:
        described: what the weights are, for messages.

    Raises:
        Refused: an embedding or LM head of the drafter's own; names missing, unused or doubled;
            shapes that are not those of ``config``.
    """
    source = _Pairs(weights, described)
    own = sorted(name for name in source.names() if name.endswith(BORROWED))
    if own:
        raise Refused(f"{described}: weights", own, "none of these: a drafter borrows the target's")
    with torch.device("meta"):  # layers that know their names and shapes and hold no memory
        layers = DFlashBackbone(config.backbone, torch.float32, SingleRank())
    sorted_weights = PublishedWeights({}, {})
    loaders = {
        name: _keep(sorted_weights.backbone, name, load) for name, load in layers.loaders().items()
    }
    if config.domino is not None:
        shapes = head_shapes(config.domino, config.backbone.hidden_size, config.vocab_size)
        for name, shape in shapes.items():
            loaders[name] = _keep(sorted_weights.head, name, _refuse_other_shapes(shape))
    load_strictly(source, loaders, prefixes=CONTAINERS)
    return sorted_weights


class _Pairs:
    """Pairs read once, as a weight source."""

    def __init__(self, pairs: Iterable[tuple[str, Tensor]], described: str) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._described = described
        for name, tensor in pairs:
            if name in self._tensors:
                raise Refused(f"{described}: weight {name}", "twice", "each weight once")
            self._tensors[name] = tensor

    def names(self) -> set[str]:
        return set(self._tensors)

    def get(self, name: str) -> Tensor:
        return self._tensors[name]

    def describe(self) -> str:
        return self._described


def _keep(
    into: dict[str, Tensor], name: str, check: Callable[[Tensor], None]
) -> Callable[[Tensor], None]:
    def load(full: Tensor) -> None:
        check(full)
        into[name] = full

    return load


def _refuse_other_shapes(wanted: tuple[int, ...]) -> Callable[[Tensor], None]:
    def check(full: Tensor) -> None:
        if tuple(full.shape) != wanted:
            raise Refused("shape", tuple(full.shape), f"{wanted}")

    return check
