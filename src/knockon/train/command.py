"""One configured run: the settings told and kept, then the stages."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from knockon.errors import Refused
from knockon.models.catalog import resolve
from knockon.train.config import TrainConfig
from knockon.train.run import Pipeline


def carry_out(config: TrainConfig, stage: str) -> None:
    """Run a stage, or all.

    Args:
        stage: one of :data:`~knockon.train.config.STAGES`.

    Raises:
        Refused: settings that the target, the data or an earlier stage's result do not fit.
    """
    if stage in ("export", "all") and config.out is None:
        raise Refused("out", None, "a folder to export to")
    text = config.to_yaml()
    print(text, flush=True)
    pipeline = open_pipeline(config)
    (pipeline.work / "train.yaml").write_text(text)
    if stage == "generate":
        pipeline.args.minutes = config.generate_minutes
    getattr(pipeline, stage)()
    if config.out is not None and stage in ("export", "all"):
        (Path(config.out) / "train.yaml").write_text(text)


def open_pipeline(config: TrainConfig) -> Pipeline:
    """The stages over the configured target."""
    fields = dataclasses.asdict(config)
    fields["target"] = str(resolve(config.target))
    fields["name"] = config.name or config.target
    return Pipeline(argparse.Namespace(**fields))
