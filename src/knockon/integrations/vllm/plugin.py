"""The entry point: vLLM calls :func:`register` once in each of its processes."""

from __future__ import annotations

import logging

from knockon.errors import Refused
from knockon.integrations.vllm.versions import adapter_for, installed_version

# A child of vLLM's logger, so that its handlers show it.
logger = logging.getLogger("vllm.knockon")

# vLLM puts "DFlash" before a DFlash drafter's architecture that does not begin with it.
ARCHITECTURES = ("DominoDraftModel", "DFlashDominoDraftModel")
_MODEL = "knockon.integrations.vllm.model:DominoDraftModel"
_REFUSED_MODEL = "knockon.integrations.vllm.refused_model:DominoDraftModel"


def register() -> None:
    """Make vLLM know Domino checkpoints, where its version is supported; safe to repeat.

    Under any other version nothing of vLLM's is touched, every other model is served as if Knockon
    were not there, and a Domino checkpoint is refused with the list of versions supported.
    """
    from vllm import ModelRegistry

    model = _MODEL
    try:
        adapter_for(installed_version()).install()
    except Refused as refusal:
        logger.warning("Knockon cannot serve Domino drafters here. %s", refusal)
        model = _REFUSED_MODEL
    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, model)
