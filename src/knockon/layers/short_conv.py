"""The short causal convolution before a recurrence: one filter a channel, a few positions long."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ConvRows(NamedTuple):
    """Inputs of the convolution, and where those before them lie.

    Attributes:
        rows: ``[B, T, C]``, which may be parts of longer rows.
        before: ``[S, K - 1, C]``, by slot.
        slots: ``[B]`` int64, whose inputs the rows continue.
        starts: ``[B]`` int64, position of each request's first row; before position 0 all is zero.
            ``None`` where no request begins.
    """

    rows: Tensor
    before: Tensor
    slots: Tensor
    starts: Tensor | None = None

    def joined(self) -> Tensor:
        """Those before and the rows, a copy: ``[B, K - 1 + T, C]``."""
        before = self.before.index_select(0, self.slots)
        if self.starts is not None:
            before.masked_fill_((self.starts == 0)[:, None, None], 0)
        return torch.cat([before, self.rows], 1)


def short_conv(rows: Tensor, weight: Tensor) -> Tensor:
    """``SiLU`` of the convolution. Sums are taken in the taps' order, alike for any number of rows.

    Args:
        rows: ``[B, K - 1 + T, C]``: the ``K - 1`` inputs before the first row, then the rows.
        weight: ``[K, C]``, the tap of a row itself last; FP32 or FP64, which sums are taken in.

    Returns:
        ``[B, T, C]`` in the weight's dtype.
    """
    taps = len(weight)
    count = rows.shape[1] - taps + 1
    wide = rows.to(weight.dtype)
    out = wide[:, :count] * weight[0]
    for tap in range(1, taps):
        out = torch.addcmul(out, wide[:, tap : tap + count], weight[tap])
    return F.silu(out)


def inputs_before(rows: Tensor, lengths: Tensor | int, taps: int) -> Tensor:
    """The ``K - 1`` inputs that the row after the first ``lengths`` will read: ``[B, K - 1, C]``.

    Args:
        rows: as in :func:`short_conv`.
        lengths: ``[B]`` int64 on the device, or a number for all.
        taps: ``K``.
    """
    if isinstance(lengths, int):
        return rows[:, lengths : lengths + taps - 1]
    at = lengths.unsqueeze(1) + torch.arange(taps - 1, device=lengths.device)
    return rows.gather(1, at.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))
