"""Accepting the longest prefix of proposals that the target drew too."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Accepted(NamedTuple):
    """What one verification gave.

    Attributes:
        tokens: int64 ``[B, w]``, the accepted proposals, then the bonus token, then -1.
        lengths: int64 ``[B]``, the accept lengths: tokens gained, bonus included, 1 … ``w``.
        bonus: int64 ``[B]``, the last token gained, not yet run through the target.
    """

    tokens: Tensor
    lengths: Tensor
    bonus: Tensor


def accept(proposals: Tensor, drawn: Tensor) -> Accepted:
    """Accepts ``d_i`` while the target drew it at row ``i``; its first other token is the bonus.

    Args:
        proposals: int64 ``[B, w-1]``; a negative id is never accepted.
        drawn: int64 ``[B, w]``, the target's own token at every row.

    Returns:
        See :class:`Accepted`. With ``w = 1`` the drawn token is the bonus.
    """
    accepted = (proposals == drawn[:, :-1]).long().cumprod(1).sum(1)
    lengths = accepted + 1
    rows = torch.arange(drawn.shape[1], device=drawn.device)
    # What was accepted is what was drawn, so the gained tokens are the drawn ones up to the bonus.
    tokens = torch.where(rows < lengths[:, None], drawn, -1)
    return Accepted(tokens, lengths, drawn.gather(1, accepted[:, None])[:, 0])
