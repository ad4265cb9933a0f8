"""The oracle for many blocks at once: :mod:`knockon.rollout.reference` in FP64 tensor operations.

What is rounded is the caller's choice: it passes base logits and input gates as they are to be
read, rounded to the dtype of a rollout or not at all. Everything from there on is FP64. Sizes:
``B`` blocks, ``T`` rows, ``V`` ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from knockon.rollout.head import DominoHead


class Reading(NamedTuple):
    """What the specification gives.

    Attributes:
        tokens: ``[B, T]`` int64.
        leads: ``[B, T]`` FP64, the winner's sum less the best other sum it could have lost to;
            ``inf`` without another, NaN between infinities.
    """

    tokens: Tensor
    leads: Tensor


class BatchedReference:
    """Reads blocks with one head.

    Args:
        head: any dtype; its weights are widened.
        gates: input gates ``W_ih · embedding(v)`` of every id, ``[V, 3G]`` FP64, as
            :func:`input_gates` gives them.
    """

    def __init__(self, head: DominoHead, gates: Tensor) -> None:
        self.prefix_len = head.prefix_len
        self.gates = gates
        self.state_weight = head.gru_state.double()
        self.w1, self.w2 = head.correction_in.double(), head.correction_out.double()

    def read(self, z: Tensor, bonus: Tensor, base: Tensor, pool_size: int = 0) -> Reading:
        """The chains of blocks.

        Args:
            z: the rows that propose, ``[B, T, H]``.
            bonus: ``[B]``.
            base: base logits ``[B, T, V]``.
            pool_size: ``K``; 0, or ``V`` and more, scores the whole vocabulary.
        """
        (batch, steps, vocab), p = base.shape, self.prefix_len
        everything = torch.ones(batch, vocab, dtype=torch.bool, device=base.device)
        allowed = pool_mask(base[:, p:], pool_size) if steps > p else everything
        state = self._zero_state(len(bonus))
        token = bonus
        tokens, leads = [], []
        for j in range(steps):
            state = self._cell(state, token)
            sums = base[:, j].double() + self.correction(z[:, j], state) if j >= p else base[:, j]
            token, lead = choose(sums, allowed if j >= p else everything)
            tokens.append(token)
            leads.append(lead)
        empty = bonus.new_empty((len(bonus), 0))
        if steps == 0:
            return Reading(empty, empty.double())
        return Reading(torch.stack(tokens, 1), torch.stack(leads, 1))

    def correction_after(self, z: Tensor, bonus: Tensor, before: Tensor) -> Tensor:
        """``c_j [B, V]`` of row ``j``, given the ``j`` proposals before it.

        Args:
            z: that row, ``[B, H]``.
            before: ``[B, j]``.
        """
        state = self._zero_state(len(bonus))
        for token in (bonus, *before.unbind(1)):
            state = self._cell(state, token)
        return self.correction(z, state)

    def correction(self, z: Tensor, state: Tensor) -> Tensor:
        """``W2 · SiLU(W1 · [z ; s])``: ``[B, V]``."""
        pre = torch.cat((z.double(), state), dim=-1) @ self.w1.t()
        return (pre * pre.sigmoid()) @ self.w2.t()

    def _zero_state(self, batch: int) -> Tensor:
        return self.state_weight.new_zeros((batch, self.state_weight.shape[1]))

    def _cell(self, state: Tensor, token: Tensor) -> Tensor:
        i_reset, i_update, i_new = self.gates[token].chunk(3, -1)
        h_reset, h_update, h_new = (state @ self.state_weight.t()).chunk(3, -1)
        reset, update = (i_reset + h_reset).sigmoid(), (i_update + h_update).sigmoid()
        new = (i_new + reset * h_new).tanh()
        return (1 - update) * new + update * state


def input_gates(head: DominoHead, embedding: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``[V, 3G]`` FP64: ``W_ih · embedding(v)``, rounded to ``dtype`` if one is given."""
    gates = embedding.double() @ head.gru_input.double().t()
    return gates if dtype is None else gates.to(dtype).double()


def pool_mask(base: Tensor, pool_size: int) -> Tensor:
    """``[B, V]``: the ``K`` ids of highest score, ties at the cutoff to the lowest ids.

    Args:
        base: the corrected rows, ``[B, T - p, V]``.
    """
    score = scores(base)
    vocab = score.shape[-1]
    if not 0 < pool_size < vocab:
        return torch.ones_like(score, dtype=torch.bool)
    # Two stable sorts make one by (is a number, value, lowest id); NaN's value is set to -inf.
    by_value = score.nan_to_num(-torch.inf, torch.inf, -torch.inf).sort(
        dim=-1, descending=True, stable=True
    )
    is_nan = score.isnan().gather(-1, by_value.indices)
    numbers_first = is_nan.int().sort(dim=-1, stable=True).indices[:, :pool_size]
    best = by_value.indices.gather(-1, numbers_first)
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, best, True)


def scores(base: Tensor) -> Tensor:
    """``score_v``: the best base logit of each id over the rows, NaN where no row has a number."""
    numbers = base.double().nan_to_num(-torch.inf, torch.inf, -torch.inf)
    return numbers.amax(1).masked_fill(base.isnan().all(1), torch.nan)


def choose(sums: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """The best allowed id of each row of ``sums [B, V]``, the lowest of ties, and its lead.

    By value; NaN loses to every number.
    """
    numbers = allowed & ~sums.isnan()
    values = sums.double().masked_fill(~numbers, -torch.inf)
    best = values.amax(-1, keepdim=True)
    # Without an allowed number every allowed id ties, as NaN.
    tied = torch.where(numbers.any(-1, keepdim=True), numbers & (values == best), allowed)
    ids = torch.arange(sums.shape[-1], device=sums.device)
    token = torch.where(tied, ids, sums.shape[-1]).amin(-1)
    others = values.scatter(-1, token.unsqueeze(-1), -torch.inf)
    return token, best.squeeze(-1) - others.amax(-1)
