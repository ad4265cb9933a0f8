"""Going on from a published drafter: its weights, read strictly into a module to be trained."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from knockon.drafters.config import DraftConfig, parse_draft_config
from knockon.drafters.load import read_draft_config
from knockon.drafters.mtp_config import MTPConfig
from knockon.errors import Refused
from knockon.models.config import ModelConfig
from knockon.models.safetensors_source import SafetensorsFolder
from knockon.models.strict import load_strictly
from knockon.train.drafter_module import DraftModule
from knockon.train.export import named_weights
from knockon.train.mtp_module import MTPModule

_HEAD = ("prefix_gru.", "embed_proj.")


def start_from(module: DraftModule | MTPModule, folder: Path, target: ModelConfig) -> None:
    """Overwrite the module's weights with those of a published folder.

    A DFlash module may start from a Domino drafter whose labels are not shifted, and takes its
    backbone; the other way round the head keeps its starting weights. With shifted labels a row of
    the backbone stands for another token than DFlash's.

    Raises:
        Refused: a drafter of another target, kind or size, or weights that do not fit its
            configuration.
    """
    theirs = read_draft_config(folder)
    theirs.check_target(target)
    differs = _difference(module.config, theirs)
    if differs is not None:
        name, found, wanted = differs
        raise Refused(f"start {folder}: {name}", found, f"{wanted}, as configured")
    loaders = {name: _into(weight, name) for name, weight in named_weights(module).items()}
    unused: tuple[str, ...] = ()
    if isinstance(module, DraftModule) and isinstance(theirs, DraftConfig):
        _refuse_shifted(module.config, theirs)
        if theirs.domino is None:
            loaders = {n: load for n, load in loaders.items() if not n.startswith(_HEAD)}
        elif module.config.domino is None:
            unused = _HEAD
    load_strictly(SafetensorsFolder(folder), loaders, ignored_prefixes=unused)


def load_module(
    folder: Path, target: ModelConfig, dtype: torch.dtype = torch.float32
) -> DraftModule:
    """A trainable module of a published folder's own sizes and weights.

    Raises:
        Refused: as :func:`start_from`.
    """
    config = parse_draft_config(json.loads((folder / "config.json").read_text()))
    module = DraftModule(config, dtype)
    start_from(module, folder, target)
    return module


def _difference(
    ours: DraftConfig | MTPConfig, theirs: DraftConfig | MTPConfig
) -> tuple[str, object, object] | None:
    """The first field in which two configurations differ: its name, their value and ours."""
    if type(ours) is not type(theirs):
        return "architecture", type(theirs).__name__, type(ours).__name__
    for field in dataclasses.fields(ours):
        wanted, found = getattr(ours, field.name), getattr(theirs, field.name)
        if wanted == found or (field.name == "domino" and None in (wanted, found)):
            continue
        if dataclasses.is_dataclass(wanted) and dataclasses.is_dataclass(found):
            for part in dataclasses.fields(wanted):
                one, other = getattr(found, part.name), getattr(wanted, part.name)
                if one != other:
                    return part.name, one, other
        return field.name, found, wanted
    return None


def _refuse_shifted(*configs: DraftConfig) -> None:
    """Refuses to pass a backbone between DFlash and a Domino drafter of shifted labels."""
    heads = [config.domino for config in configs]
    if None in heads and any(head is not None and head.shift_label for head in heads):
        raise Refused("start: shift_label", True, "false, between DFlash and Domino")


def _into(weight: Tensor, name: str) -> Callable[[Tensor], None]:
    def load(full: Tensor) -> None:
        if full.shape != weight.shape:
            raise Refused(name, tuple(full.shape), str(tuple(weight.shape)))
        with torch.no_grad():
            weight.copy_(full)

    return load
