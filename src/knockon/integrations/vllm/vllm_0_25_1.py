"""vLLM 0.25.1."""

from __future__ import annotations

from typing import Any

from knockon.drafters.config import DraftConfig
from knockon.errors import Refused
from knockon.integrations.vllm.adapter import Adapter
from knockon.integrations.vllm.diversions import PROPOSER, SPECULATOR


def _refuse(vllm_config: Any, config: DraftConfig) -> None:
    kinds = sorted({str(seen) for seen in config.backbone.visibility})
    if len(kinds) > 1:
        raise Refused("layer_types", kinds, "one kind for all layers under vLLM 0.25.1")


ADAPTER = Adapter("0.25.1", (SPECULATOR, PROPOSER), _refuse)
