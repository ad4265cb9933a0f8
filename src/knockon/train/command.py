"""One configured run: the settings told and kept, then the stages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from knockon.errors import Refused
from knockon.train.config import TrainConfig
from knockon.train.ranks import training_ranks
from knockon.train.run import Pipeline

# Stages that the ranks of `torchrun` carry out together; the first one alone does the others.
_SHARED = ("all", "generate", "train")


def carry_out(config: TrainConfig, stage: str) -> None:
    """Run a stage, or all; under ``torchrun`` on all of its ranks.

    Args:
        stage: one of :data:`~knockon.train.config.STAGES`.

    Raises:
        Refused: settings that the target, the data or an earlier stage's result do not fit.
    """
    if stage in ("export", "all") and config.out is None:
        raise Refused("out", None, "a folder to export to")
    text = config.to_yaml()
    with training_ranks() as ranks:
        if not ranks.first and stage not in _SHARED:
            return
        pipeline = Pipeline(config, ranks)
        if ranks.first:
            print(text, flush=True)
            (pipeline.work / "train.yaml").write_text(text)
        getattr(pipeline, stage)()
        if ranks.first and config.out is not None and stage in ("export", "all"):
            (Path(config.out) / "train.yaml").write_text(_by_steps(config).to_yaml())


def _by_steps(config: TrainConfig) -> TrainConfig:
    """The settings that make the same drafter on a machine of another speed."""
    facts = Path(config.work) / "train.json"
    if config.steps is not None or not facts.exists():
        return config
    return replace(config, steps=json.loads(facts.read_text())["training steps"])
