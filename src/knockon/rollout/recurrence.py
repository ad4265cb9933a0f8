"""The GRU over proposed tokens, arranged so that a step is one small matrix product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from knockon.rollout.head import DominoHead


class Recurrence:
    """State side of the head: ``W_hh`` and the state half of ``W1``, both in FP32 (FP64).

    Both read the same state, so they are stacked and applied in one product per step.
    """

    def __init__(self, head: DominoHead) -> None:
        width, hidden = head.gru_size, head.hidden_size
        state_half = head.correction_in[:, hidden:]
        self.gates = 3 * width
        self.width = width
        self.stacked = torch.cat((head.gru_state, state_half)).to(head.compute_dtype)
        self.draft_half = head.correction_in[:, :hidden].to(head.compute_dtype).contiguous()

    def from_draft(self, z: Tensor) -> Tensor:
        """The ``z`` half of ``W1 · [z ; s]`` for all rows at once: ``[T, B, H] -> [T, B, E]``."""
        return F.linear(z.to(self.draft_half.dtype), self.draft_half)

    def from_state(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """State gates ``[B, 3G]`` and the state half of ``W1 · [z ; s]``, ``[B, E]``."""
        both = F.linear(state, self.stacked)
        return both[:, : self.gates], both[:, self.gates :]

    def zero_state(self, batch: int) -> tuple[Tensor, Tensor]:
        """The state before the bonus token, ``[B, G]``, and its gates, ``[B, 3G]``."""
        zeros = self.stacked.new_zeros((batch, self.width + self.gates))
        return zeros[:, : self.width], zeros[:, self.width :]

    def cell(self, state: Tensor, input_gates: Tensor, state_gates: Tensor) -> Tensor:
        """One GRU cell without bias, gate order reset, update, new, as ``torch.nn.GRUCell``.

        ``r, u = sigmoid(i_ru + h_ru);  n = tanh(i_n + r · h_n);  s' = (1 - u) · n + u · s``
        """
        w = self.width
        reset_update = (input_gates[:, : 2 * w] + state_gates[:, : 2 * w]).sigmoid_()
        reset, update = reset_update[:, :w], reset_update[:, w:]
        new = torch.addcmul(input_gates[:, 2 * w :], reset, state_gates[:, 2 * w :]).tanh_()
        return torch.lerp(new, state, update)
