"""Bad words: token sequences whose last token is banned where the others have just been emitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# In a tail: no token yet. In a prefix: matches anything (it pads short sequences).
_NOTHING = -1
_ANYTHING = -2


class Encoder(Protocol):
    """The one call of a tokenizer that is needed here."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def bad_word_tokens(tokenizer: Encoder, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences to ban for ``words``: each as it stands, and after a space.

    The form after a space is left out where it ends in the plain one's tokens, which bans it
    already. (vLLM also leaves it out where the two differ in length, and so lets it through.)
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        plain = tuple(tokenizer.encode(bare, add_special_tokens=False))
        sequences[plain] = None
        if not bare.isspace():
            spaced = tuple(tokenizer.encode(" " + bare, add_special_tokens=False))
            if spaced[-len(plain) :] != plain:
                sequences[spaced] = None
    return tuple(sequence for sequence in sequences if sequence)


@dataclass(frozen=True)
class BadWords:
    """The ``N`` bad sequences of a batch, and the last ``M`` tokens of each request's output.

    Attributes:
        request: int64 ``[N]``, the row of the batch that each belongs to.
        prefix: int64 ``[N, M]``, the tokens before the last, padded on the left.
        last: int64 ``[N]``, the token to ban.
        tail: int64 ``[B, M]``, the end of the output, padded on the left; updated in place.
    """

    request: Tensor
    prefix: Tensor
    last: Tensor
    tail: Tensor

    @classmethod
    def build(
        cls,
        sequences: Sequence[Sequence[Sequence[int]]],
        outputs: Sequence[Sequence[int]],
        vocab_size: int,
        device: torch.device,
    ) -> BadWords | None:
        """``sequences[b]``: those of request ``b``. ``None`` if there are none.

        A sequence with an id outside the vocabulary can never be generated, so it is left out.
        """
        entries = [
            (b, list(ids))
            for b, per_request in enumerate(sequences)
            for ids in per_request
            if ids and min(ids) >= 0 and max(ids) < vocab_size
        ]
        if not entries:
            return None
        m = max(1, *(len(ids) - 1 for _, ids in entries))

        def tensor(values: Sequence[object]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        def padded(ids: list[int], filler: int) -> list[int]:
            return [filler] * (m - len(ids)) + ids

        return cls(
            request=tensor([b for b, _ in entries]),
            prefix=tensor([padded(ids[:-1], _ANYTHING) for _, ids in entries]),
            last=tensor([ids[-1] for _, ids in entries]),
            tail=tensor([padded(list(ids[-m:]), _NOTHING) for ids in outputs]),
        )

    def apply_(self, logits: Tensor, proposals: Tensor) -> None:
        """Bans in place: row ``i`` follows the output and ``d_0 … d_{i-1}``.

        Args:
            logits: float32 ``[B, w, V]``.
            proposals: int64 ``[B, w-1]``.
        """
        vocab_size = logits.shape[-1]
        windows = torch.cat([self.tail, proposals], 1).unfold(1, self.tail.shape[1], 1)
        prefix = self.prefix[:, None]  # [N, 1, M] against [N, w, M]
        banned = ((windows[self.request] == prefix) | (prefix == _ANYTHING)).all(-1)  # [N, w]
        rows = self.request[:, None] * logits.shape[1]
        rows = rows + torch.arange(logits.shape[1], device=logits.device)
        # Added, not assigned: two sequences may end in the same token and only one of them match.
        ban = torch.zeros(banned.shape, dtype=logits.dtype, device=logits.device)
        ban.masked_fill_(banned, -torch.inf)
        flat = rows * vocab_size + self.last[:, None]
        logits.view(-1).scatter_add_(0, flat.reshape(-1), ban.reshape(-1))

    def record(self, tokens: Tensor, kept: Tensor) -> None:
        """Appends the first ``kept [B]`` of each request's ``tokens [B, w]`` to its tail."""
        m = self.tail.shape[1]
        index = kept[:, None] + torch.arange(m, device=tokens.device)
        self.tail.copy_(torch.cat([self.tail, tokens], 1).gather(1, index))
