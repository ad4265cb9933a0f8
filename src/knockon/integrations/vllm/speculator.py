"""Domino under vLLM's second model runner: its DFlash speculator with another choice of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from knockon.integrations.vllm.choice import build_rollout, choose, prepare


class DominoSpeculator(DFlashSpeculator):
    """Context, block, attention and CUDA graph are vLLM's; the tokens are the rollout's.

    The rollout runs where vLLM would sample, so it is captured with the draft in one graph.
    """

    _speculator_name = "Domino"

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self._settings = prepare(vllm_config)
        self._block_rows: Tensor | None = None
        self._for_a_graph = False
        super().__init__(vllm_config, device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the drafter, which then shares the target's embedding and head; add the rollout."""
        super().load_model(*args, **kwargs)
        self.rollout = build_rollout(self.model, get_tp_group(), self._settings)

    def capture(self, *args: Any, **kwargs: Any) -> Any:
        """Capture; the runs that warm up for it take the exchange that the graph will take."""
        self._for_a_graph = True
        try:
            return super().capture(*args, **kwargs)
        finally:
            self._for_a_graph = False

    def _run_model(self, *args: Any, **kwargs: Any) -> Tensor:
        rows: Tensor = super()._run_model(*args, **kwargs)
        self._block_rows = rows
        return rows

    def sample_draft(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """The chain of every block, ``[B * steps]``, from the rows that the model has just given.

        vLLM hands over the rows of the masks alone; which rows are read is the checkpoint's to say
        (``shift_label``), so the whole block is.
        """
        assert self._block_rows is not None
        steps = self.num_speculative_steps
        ids = self.input_buffers.input_ids[: len(hidden_states) // steps * (steps + 1)]
        in_graph = True if self._for_a_graph else None
        return choose(self.rollout, self._block_rows, ids, steps, in_graph).view(-1)
