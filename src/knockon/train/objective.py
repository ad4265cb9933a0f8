"""The training objective of a block drafter, as pure functions (spec: "Training objective").

A block starts at an *anchor*: its first row holds the true token there, the others the mask. Row
``j`` of proposals, the ``j``-th token after the anchor, has its label at position ``anchor + 1 +
j``; which row of the backbone predicts it depends on ``shift_label``. The loss of a row is ``(1 -
lambda) CE(base + correction) + lambda CE(base)``, weighted ``exp(-j/gamma)``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from knockon.errors import Refused


class Anchors(NamedTuple):
    """Blocks of a batch: ``position [b, N]`` int64; ``valid [b, N]`` false where too few."""

    position: Tensor
    valid: Tensor


class Labels(NamedTuple):
    """What the rows of proposals are held to, each ``[b, N, J]``.

    Attributes:
        token: the true token of each row (0 where there is none).
        position: of that token in its sequence, clamped into it.
        weight: ``exp(-j/gamma)``, 0 where the label lies outside the supervised span.
        corrected: false for ``j < pure_draft_prefix_len``, whose loss is that of the base alone.
    """

    token: Tensor
    position: Tensor
    weight: Tensor
    corrected: Tensor


def proposals_per_block(block_size: int, shift_label: bool) -> int:
    """Rows that train: all ``L`` with shifted labels (one token further), ``L - 1`` without."""
    return block_size if shift_label else block_size - 1


def refuse_unsupervised(supervised: Tensor) -> None:
    """Refuses data in which nothing can be learnt.

    Args:
        supervised: bool ``[..., T]``.

    Raises:
        Refused: where no sequence has two supervised tokens in a row, that is, where no anchor
            exists.
    """
    if not bool((supervised[..., :-1] & supervised[..., 1:]).any()):
        raise Refused(
            "supervised tokens", int(supervised.sum()), "at least two in a row in some sequence",
            "Nothing would be learnt: check prompt lengths or what marks the answers",
        )  # fmt: skip


def sample_anchors(
    supervised: Tensor, count: int, generator: torch.Generator | None = None
) -> Anchors:
    """Distinct anchors, uniform among positions supervised together with the next one.

    Args:
        supervised: bool ``[b, T]``.
        count: anchors a sequence, ``N``.
        generator: on the same device.
    """
    allowed = supervised.clone()
    allowed[:, -1] = False
    allowed[:, :-1] &= supervised[:, 1:]
    keys = torch.rand(supervised.shape, device=supervised.device, generator=generator)
    keys = keys.masked_fill(~allowed, -1.0)
    best = keys.topk(min(count, supervised.shape[1]), dim=1)
    valid = best.values >= 0
    return Anchors(best.indices.masked_fill(~valid, 0), valid)


def block_labels(
    tokens: Tensor,
    supervised: Tensor,
    anchors: Anchors,
    block_size: int,
    shift_label: bool,
    gamma: float,
    pure_draft_prefix_len: int,
) -> Labels:
    """Labels and weights of every row of proposals.

    Args:
        tokens: ``[b, T]`` int64.
        supervised: bool ``[b, T]``; a row counts while every token from its anchor to its label is
            supervised, so that a block never reaches over a gap into another answer or document.
    """
    rows = proposals_per_block(block_size, shift_label)
    j = torch.arange(rows, device=tokens.device)
    position = anchors.position[..., None] + 1 + j
    inside = position < tokens.shape[1]
    position = position.clamp(max=tokens.shape[1] - 1)
    flat = position.flatten(1)
    token = tokens.gather(1, flat).view(position.shape)
    here = supervised.gather(1, flat).view(position.shape) & inside & anchors.valid[..., None]
    weight = torch.exp(-j / gamma) * here.cumprod(-1)
    return Labels(token, position, weight, (j >= pure_draft_prefix_len).expand(position.shape))


def teacher_tokens(tokens: Tensor, anchors: Anchors, rows: int) -> Tensor:
    """True tokens read by the GRU before row ``j``, at ``anchor .. anchor + j``: ``[b, N, rows]``.

    Row ``j``'s state is the GRU's output after the ``j``-th of them (from 0): the spec's ``s_j``,
    over ``[bonus, d_0 .. d_{j-1}]``.
    """
    position = anchors.position[..., None] + torch.arange(rows, device=tokens.device)
    position = position.clamp(max=tokens.shape[1] - 1)
    return tokens.gather(1, position.flatten(1)).view(position.shape)


def proposal_rows(hidden: Tensor, shift_label: bool) -> Tensor:
    """Rows of ``[..., L, H]`` that propose: all with shifted labels, else all but the first."""
    return hidden if shift_label else hidden[..., 1:, :]


def visibility(
    anchors: Anchors, length: int, block_size: int, documents: Tensor | None = None
) -> Tensor:
    """What each block row may see: context strictly before its anchor, and its own block both ways.

    Args:
        length: context rows ``T`` of each sequence.
        documents: ``[b, T]`` ids where several documents are packed in one row; a block sees only
            its own.

    Returns:
        bool ``[b, N * L, T + N * L]``; keys are the context, then all blocks in order.
    """
    position = anchors.position
    batch, blocks = position.shape
    context = torch.arange(length, device=position.device) < position[..., None]
    if documents is not None:
        context &= documents[:, None, :] == documents.gather(1, position)[..., None]
    context = context.repeat_interleave(block_size, dim=1)
    owner = torch.arange(blocks, device=position.device).repeat_interleave(block_size)
    own = (owner[:, None] == owner).expand(batch, -1, -1)
    return torch.cat((context, own), dim=-1)


def correction_lambda(
    progress: float, lambda_end: float = 0.0, falls_over: float = 0.5, start: float = 1.0
) -> float:
    """Weight of the base's own loss at this share of training: linear from `start` to `lambda_end`.

    Args:
        progress: 0 at the start, 1 at the end.
        lambda_end: the published recipe ends at 0. Above 0 the backbone keeps being trained for its
            own argmax, which is what the uncorrected first proposal rests on.
        falls_over: share of training over which it falls.
        start: 1 in the published recipe; less where the backbone has been trained before.
    """
    return lambda_end + (start - lambda_end) * max(0.0, 1.0 - progress / falls_over)


def learning_rate(progress: float, warmup: float, peak: float) -> float:
    """Linear warm-up over the first `warmup` share of training, then a cosine to 0."""
    if progress < warmup:
        return peak * progress / warmup
    turned = min(1.0, (progress - warmup) / (1.0 - warmup))
    return peak * 0.5 * (1.0 + math.cos(math.pi * turned))
