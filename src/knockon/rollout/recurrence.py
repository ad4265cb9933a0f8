"""The GRU over proposed tokens, arranged so that a step is one small matrix product."""

from __future__ import annotations

import torch
from torch import Tensor

from knockon.rollout.head import DominoHead
from knockon.rollout.products import linear, sums_in_fp32


class Recurrence:
    """State side of the head: ``W_hh`` and the state half of ``W1``, both in FP32 (FP64).

    Both read the same state, so they are stacked and applied in one product per step.
    """

    def __init__(self, head: DominoHead) -> None:
        width, hidden = head.gru_size, head.hidden_size
        state_half = head.correction_in[:, hidden:]
        self.gates = 3 * width
        self.width = width
        self.dtype = head.compute_dtype
        self.stacked = torch.cat((head.gru_state, state_half)).to(self.dtype)
        draft_half = head.correction_in[:, :hidden]
        kept = head.dtype if sums_in_fp32(draft_half) else self.dtype
        self.draft_half = draft_half.to(kept).contiguous()

    def from_draft(self, z: Tensor) -> Tensor:
        """The ``z`` half of ``W1 · [z ; s]`` for all rows at once: ``[T, B, H] -> [T, B, E]``."""
        steps, batch, hidden = z.shape
        product = linear(z.reshape(steps * batch, hidden), self.draft_half, self.dtype)
        return product.view(steps, batch, -1)

    def products(self, draft_part: Tensor, steps: int) -> Tensor:
        """What a block's states are multiplied into, ``[T, B, 3G + E]``.

        The last ``E`` columns of the corrected rows hold the draft's part, to which
        :meth:`from_state` adds, so no step needs an addition of its own.
        """
        corrected, batch, width = draft_part.shape
        sums = draft_part.new_zeros((steps, batch, self.gates + width))
        sums[steps - corrected :, :, self.gates :] = draft_part
        return sums

    def from_state(self, state: Tensor, sums: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """State gates ``[B, 3G]`` and the state half of ``W1 · [z ; s]``, ``[B, E]``.

        Args:
            sums: what they are added to in place, ``[B, 3G + E]``: a row of :meth:`products`.
        """
        if sums is None:
            sums = state.new_zeros((len(state), len(self.stacked)))
        sums.addmm_(state, self.stacked.t())
        return sums[:, : self.gates], sums[:, self.gates :]

    def zero_state(self, batch: int) -> tuple[Tensor, Tensor]:
        """The state before the bonus token, ``[B, G]``, and its gates, ``[B, 3G]``."""
        zeros = self.stacked.new_zeros((batch, self.width + self.gates))
        return zeros[:, : self.width], zeros[:, self.width :]

    def cell(self, state: Tensor, input_gates: Tensor, state_gates: Tensor) -> Tensor:
        """One GRU cell without bias, gate order reset, update, new, as ``torch.nn.GRUCell``.

        ``r, u = sigmoid(i_ru + h_ru);  n = tanh(i_n + r · h_n);  s' = (1 - u) · n + u · s``
        """
        if state.is_cuda:  # GRUCell's own kernel: all of this in one pass
            return torch.ops.aten._thnn_fused_gru_cell(input_gates, state_gates, state)[0]
        w = self.width
        reset_update = (input_gates[:, : 2 * w] + state_gates[:, : 2 * w]).sigmoid_()
        reset, update = reset_update[:, :w], reset_update[:, w:]
        new = torch.addcmul(input_gates[:, 2 * w :], reset, state_gates[:, 2 * w :]).tanh_()
        return torch.lerp(new, state, update)
