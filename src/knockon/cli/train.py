"""``knockon train``: from a target and prompts to a drafter in the published format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    config: Annotated[
        Path, typer.Option(help="YAML file of settings; docs/training.md lists them.")
    ],
    stage: Annotated[
        str,
        typer.Option(
            help="all, or one of generate, train, evaluate, export, plot. Training that was cut "
            "short goes on where it stood; all skips what is done."
        ),
    ] = "all",
) -> None:
    """Make a drafter of any kind for a target, from text that the target itself writes.

    The settings in force are printed, and saved in the work folder and beside the drafter.
    """
    from knockon.errors import Refused
    from knockon.parallel.torchrun import leave, torchrun_size
    from knockon.train.command import carry_out
    from knockon.train.config import STAGES, read_train_config

    if stage not in STAGES:
        raise Refused("--stage", stage, f"one of {', '.join(STAGES)}")
    carry_out(read_train_config(config), stage)
    if (torchrun_size() or 1) > 1:
        leave()
