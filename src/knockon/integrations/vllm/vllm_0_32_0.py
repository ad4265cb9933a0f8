"""vLLM 0.32.0."""

from __future__ import annotations

from typing import Any

from knockon.drafters.config import DraftConfig
from knockon.errors import Refused
from knockon.integrations.vllm.adapter import Adapter
from knockon.integrations.vllm.diversions import PROPOSER, SPECULATOR


def _refuse(vllm_config: Any, config: DraftConfig) -> None:
    if vllm_config.speculative_config.enable_adaptive_verification:
        raise Refused(
            "speculative_config.enable_adaptive_verification",
            True,
            "False: it estimates acceptance from a drafter's whole logits",
        )
    if len(set(config.backbone.visibility)) > 1 and not vllm_config.use_v2_model_runner:
        raise Refused(
            "layer_types",
            [str(seen) for seen in config.backbone.visibility],
            "one kind for all layers where vLLM takes its first model runner",
        )


ADAPTER = Adapter("0.32.0", (SPECULATOR, PROPOSER), _refuse)
