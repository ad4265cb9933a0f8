"""The short causal convolution before a recurrence: one filter a channel, a few positions long."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
