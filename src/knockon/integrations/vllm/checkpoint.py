"""A Domino checkpoint that vLLM is to serve: read strictly, held to the target, told to vLLM.

vLLM's own reading of a drafter's configuration fills in what is missing and takes some fields from
one place only; Knockon's refuses, and accepts each field wherever publishers put it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from knockon.drafters.config import DraftConfig, parse_draft_config
from knockon.errors import Refused

logger = logging.getLogger("vllm.knockon")

_PLAIN = (None, "dflash")


@dataclass(frozen=True)
class _TargetSizes:
    hidden_size: int
    vocab_size: int
    num_layers: int


def asks_for_domino(speculative_config: Any) -> bool:
    """Whether vLLM's ``speculative_config`` names a drafter that is more than plain DFlash.

    A projector that is not known counts, so that it is refused by name.
    """
    draft = getattr(speculative_config, "draft_model_config", None)
    if draft is None:
        return False
    hf = draft.hf_config
    if any(name.endswith("DominoDraftModel") for name in getattr(hf, "architectures", None) or ()):
        return True
    nested = (getattr(hf, "dflash_config", None) or {}).get("projector_type")
    return nested not in _PLAIN or getattr(hf, "projector_type", None) not in _PLAIN


def read_checkpoint(draft_model_config: Any) -> DraftConfig:
    """Parse the drafter's ``config.json``, of a folder or of the hub.

    Raises:
        Refused: no such file, or what :func:`~knockon.drafters.config.parse_draft_config` refuses.
    """
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    model, revision = draft_model_config.model, draft_model_config.revision
    found = get_hf_file_to_dict("config.json", model, revision)
    if not isinstance(found, dict):
        raise Refused("speculative_config.model", model, "a checkpoint with a config.json")
    config = parse_draft_config(found)
    if config.domino is None:
        raise Refused("dflash_config.projector_type", "dflash", "'domino', as its architecture")
    return config


def hold_to_target(config: DraftConfig, model_config: Any, speculative_config: Any) -> None:
    """Refuse a drafter that was not made for this target, or not for so many tokens.

    Raises:
        Refused: sizes that differ, a context longer than the drafter's, more proposals than a block
            has.
    """
    config.check_target(
        _TargetSizes(
            model_config.get_hidden_size(),
            model_config.get_vocab_size(),
            model_config.hf_text_config.num_hidden_layers,
        )
    )
    config.check_context(model_config.max_model_len)
    proposals = speculative_config.num_speculative_tokens
    most = config.block_size - 1
    if proposals > most:
        raise Refused(
            "speculative_config.num_speculative_tokens",
            proposals,
            f"at most block_size - 1 = {most}",
        )
    if proposals < most:
        logger.warning(
            "num_speculative_tokens is %d: vLLM then drafts blocks of %d rows, and this drafter was"
            " trained on blocks of %d. Fewer tokens may be accepted than from a whole block.",
            proposals,
            proposals + 1,
            config.block_size,
        )


def tell_vllm(config: DraftConfig, draft_model_config: Any) -> None:
    """Write what the checkpoint says where vLLM looks for it.

    Raises:
        Refused: a rotary base that vLLM read otherwise.
    """
    hf = draft_model_config.hf_config
    rope = getattr(hf, "rope_parameters", None) or {}
    theta = rope.get("rope_theta", getattr(hf, "rope_theta", None))
    if theta is None or float(theta) != config.backbone.rope.theta:
        raise Refused("rope_theta as vLLM reads it", theta, f"{config.backbone.rope.theta}")
    told = dict(getattr(hf, "dflash_config", None) or {})
    told |= {
        "projector_type": "domino",
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    causal = {seen.causal for seen in config.backbone.visibility}
    if len(causal) == 1:
        told["causal"] = causal.pop()
    windows = {seen.window for seen in config.backbone.visibility} - {None}
    if windows:
        told["swa_window_size"] = windows.pop()
    hf.dflash_config = told
    hf.architectures = ["DFlashDominoDraftModel"]
