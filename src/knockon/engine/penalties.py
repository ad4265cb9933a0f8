"""Repetition, presence and frequency penalties, row by row of a verified block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Penalties:
    """What the penalised requests of a batch (``P`` of ``B``) have seen, and their penalties.

    Attributes:
        request: int64 ``[P]``, their rows of the batch.
        in_prompt: bool ``[P, V]``, tokens of the prompt.
        counts: int32 ``[P, V]``, how often each token is in the output; updated in place.
        repetition: float32 ``[P, 1]``.
        presence: float32 ``[P, 1]``.
        frequency: float32 ``[P, 1]``.
    """

    request: Tensor
    in_prompt: Tensor
    counts: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor

    @classmethod
    def build(
        cls,
        requests: Sequence[int],
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        factors: Sequence[tuple[float, float, float]],
        vocab_size: int,
        device: torch.device,
    ) -> Penalties:
        """Counts the tokens so far. ``factors``: (repetition, presence, frequency) of each."""

        def count(ids: Sequence[int]) -> Tensor:
            return torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=vocab_size)

        columns = torch.tensor(factors, dtype=torch.float32, device=device)
        return cls(
            request=torch.tensor(requests, dtype=torch.int64, device=device),
            in_prompt=torch.stack([count(ids) > 0 for ids in prompts]).to(device),
            counts=torch.stack([count(ids).int() for ids in outputs]).to(device),
            repetition=columns[:, 0:1],
            presence=columns[:, 1:2],
            frequency=columns[:, 2:3],
        )

    def apply_(self, logits: Tensor, proposals: Tensor) -> None:
        """Penalises ``logits`` in place.

        Row ``i`` counts ``d_0 … d_{i-1}`` as emitted, which is what the target alone would see
        there. A row whose proposals are wrong is never read, so its counts do not matter.

        Args:
            logits: float32 ``[B, w, V]``.
            proposals: int64 ``[B, w-1]``; a negative id counts nothing.
        """
        counts = self.counts.clone()
        for row in range(logits.shape[1]):
            if row:
                _add(counts, proposals[self.request, row - 1 : row])
            x = logits[self.request, row]
            emitted = counts > 0
            repeated = torch.where(x > 0, x / self.repetition, x * self.repetition)
            x = torch.where(emitted | self.in_prompt, repeated, x)
            x = x - self.frequency * counts - self.presence * emitted
            logits[self.request, row] = x

    def record(self, tokens: Tensor, kept: Tensor) -> None:
        """Adds the first ``kept [B]`` of each request's ``tokens [B, w]`` to its output."""
        first = torch.arange(tokens.shape[1], device=tokens.device) < kept[:, None]
        _add(self.counts, torch.where(first, tokens, -1)[self.request])


def _add(counts: Tensor, tokens: Tensor) -> None:
    """Counts the non-negative ids of ``tokens [P, n]``."""
    counts.scatter_add_(1, tokens.clamp(min=0), (tokens >= 0).to(counts.dtype))
