"""Domino under vLLM's first model runner, which CPUs and hybrid targets have: its DFlash proposer
with another choice of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.spec_decode.dflash import DFlashProposer

from knockon.integrations.vllm.choice import build_rollout, choose, prepare


class DominoProposer(DFlashProposer):
    """Context, block and attention are vLLM's; the tokens are the rollout's.

    This runner chooses tokens outside its CUDA graphs.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self._settings = prepare(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the drafter, which then shares the target's embedding and head; add the rollout."""
        super().load_model(*args, **kwargs)
        self.rollout = build_rollout(self.model, get_tp_group(), self._settings)

    def set_inputs_first_pass(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM prepares it, but all rows of a block are asked for, not the masks' alone."""
        num_tokens, masks, metadata = super().set_inputs_first_pass(*args, **kwargs)
        rows = torch.arange(num_tokens, dtype=masks.dtype, device=masks.device)
        return num_tokens, rows, metadata

    def _sample_draft_tokens(self, hidden_states: Tensor, *_: Any) -> tuple[Tensor, None]:
        """The chain of every block, ``[B * steps]``."""
        ids = self.input_ids[: len(hidden_states)]
        steps = self.num_speculative_tokens
        return choose(self.rollout, hidden_states, ids, steps).view(-1), None
