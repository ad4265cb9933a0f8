"""The gated delta rule (Yang, Kautz and Hatamizadeh, arXiv 2412.06464), by tokens and by chunks.

A head's state ``S [key_dim, value_dim]`` maps keys to values. A token of key ``k``, value ``v``,
decay ``a`` and writing strength ``β`` corrects what the decayed state says of its key:

    c_t = β_t (v_t - (a_t S_{t-1})ᵀ k_t)          the correction
    S_t = a_t S_{t-1} + k_t c_tᵀ
    o_t = S_tᵀ q_t

Heads of queries and keys are fewer than those of values: each serves as many in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from knockon.layers.whole_vectors import by_whole_vectors

_CHUNK = 64


class DeltaInputs(NamedTuple):
    """What the rule reads of ``T`` rows, FP32 or FP64.

    Attributes:
        q, k: ``[B, T, key_heads, key_dim]``, of length one, ``q`` scaled.
        v: ``[B, T, value_heads, value_dim]``.
        log_decay, beta: ``[B, T, value_heads]``; ``log a <= 0`` and ``β``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor


# Takes a prompt's rows in by chunks: outputs and the last state, as :func:`delta_chunks` has them.
DeltaChunks = Callable[[DeltaInputs, Tensor], tuple[Tensor, Tensor]]


def without_padding(inputs: DeltaInputs, counts: Tensor) -> DeltaInputs:
    """Inputs whose rows past the first ``counts [B]`` leave a state as it is."""
    rows = torch.arange(inputs.v.shape[1], device=counts.device)
    padding = (rows >= counts.unsqueeze(1)).unsqueeze(-1)
    return inputs._replace(
        log_decay=inputs.log_decay.masked_fill(padding, 0), beta=inputs.beta.masked_fill(padding, 0)
    )


def chunks_and_kept(
    chunks: DeltaChunks, inputs: DeltaInputs, state: Tensor, counts: Tensor, cut: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """A prompt's rows by ``chunks``, and the states after the first ``counts [B]`` of them.

    Without a ``cut`` the rows are gone through twice, the first time with those behind blanked out:
    what is launched then depends on no count, and outputs and last states have the bits they would
    have had anyway.

    Args:
        cut: what all ``counts`` are, if the host knows; at least 1, and fewer than there are rows.

    Returns:
        Outputs, the last states and those in between.
    """
    if cut is not None:
        first, kept = chunks(DeltaInputs(*(x[:, :cut] for x in inputs)), state)
        second, last = chunks(DeltaInputs(*(x[:, cut:] for x in inputs)), kept)
        return torch.cat([first, second], 1), last, kept
    _, kept = chunks(without_padding(inputs, counts), state)
    out, last = chunks(inputs, state)
    return out, last, kept


def delta_steps(
    inputs: DeltaInputs, state: Tensor, kept: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Token by token: a row has the same bits in a block of any length.

    Args:
        state: ``[B, value_heads, key_dim, value_dim]`` in the inputs' dtype; overwritten.
        kept: what states are kept in; each is rounded to it before the next token.

    Returns:
        Outputs and corrections, both as ``v``, and the last state.
    """
    q, k = _per_value_head(inputs.q, inputs.v), _per_value_head(inputs.k, inputs.v)
    decay = by_whole_vectors(torch.exp, inputs.log_decay)
    out, corrections = torch.empty_like(inputs.v), torch.empty_like(inputs.v)
    for t in range(inputs.v.shape[1]):
        state.mul_(decay[:, t, :, None, None])
        said = (k[:, t].unsqueeze(-2) @ state).squeeze(-2)
        corrections[:, t] = (inputs.v[:, t] - said) * inputs.beta[:, t].unsqueeze(-1)
        _write(state, k[:, t], corrections[:, t])
        out[:, t] = (q[:, t].unsqueeze(-2) @ state).squeeze(-2)
        state = _rounded(state, kept)
    return out, corrections, state


def replay(
    state: Tensor,
    k: Tensor,
    corrections: Tensor,
    log_decay: Tensor,
    lengths: Tensor,
    kept: torch.dtype,
) -> Tensor:
    """The state after the first ``lengths [B]`` rows of a block that :func:`delta_steps` ran.

    The same bits as that block would have left, cut short there; lengths are read on the device.

    Args:
        state: before the block; overwritten.
        k, corrections, log_decay: of its rows.
    """
    rows = k.shape[1]
    live = torch.arange(rows, device=lengths.device) < lengths.unsqueeze(1)
    decay = by_whole_vectors(torch.exp, log_decay).masked_fill(~live.unsqueeze(-1), 1)
    corrections = corrections.masked_fill(~live[..., None, None], 0)
    k = _per_value_head(k, corrections)
    if lengths.device.type == "cpu":  # rows that nobody keeps change nothing
        rows = int(lengths.max()) if len(lengths) else 0
    for t in range(rows):
        state.mul_(decay[:, t, :, None, None])
        _write(state, k[:, t], corrections[:, t])
        state = _rounded(state, kept)
    return state


def delta_chunks(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """By chunks of rows, each a few matrix products: for prompts.

    With ``g_t`` the chunk's decays multiplied up to row ``t``, unrolling the rule gives
    ``c_t = β_t (v_t - g_t Sᵀ k_t - Σ_{i<t} (g_t / g_i) (k_t · k_i) c_i)``: one triangular system
    for the corrections of a chunk, from which outputs and the next state follow.

    Args:
        state: as in :func:`delta_steps`; left as it is.

    Returns:
        Outputs, as ``v``, and the last state.
    """
    heads = [_per_value_head(inputs.q, inputs.v), _per_value_head(inputs.k, inputs.v), inputs.v]
    q, k, v = (x.transpose(1, 2) for x in heads)
    log_decay, beta = inputs.log_decay.transpose(1, 2), inputs.beta.transpose(1, 2).unsqueeze(-1)
    outputs = []
    for start in range(0, v.shape[2], _CHUNK):
        rows = slice(start, start + _CHUNK)
        total = log_decay[:, :, rows].cumsum(-1)
        between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril()  # log g_t / g_i for i <= t
        share = between.exp().tril()
        since = total.exp().unsqueeze(-1)
        keys, queries, strength = k[:, :, rows], q[:, :, rows], beta[:, :, rows]
        system = strength * share * (keys @ keys.transpose(-1, -2))
        found = strength * (v[:, :, rows] - since * (keys @ state))
        corrections = torch.linalg.solve_triangular(system, found, upper=False, unitriangular=True)
        seen = share * (queries @ keys.transpose(-1, -2))
        outputs.append(since * (queries @ state) + seen @ corrections)
        left = (total[..., -1:] - total).exp().unsqueeze(-1)
        state = since[:, :, -1:] * state + (left * keys).transpose(-1, -2) @ corrections
    return torch.cat(outputs, 2).transpose(1, 2), state


def _per_value_head(x: Tensor, values: Tensor) -> Tensor:
    """``[B, T, key_heads, D]`` with a row for each value head."""
    repeat = values.shape[2] // x.shape[2]
    return x if repeat == 1 else x.repeat_interleave(repeat, 2)


def _write(state: Tensor, k: Tensor, correction: Tensor) -> None:
    state.addcmul_(k.unsqueeze(-1), correction.unsqueeze(-2))


def _rounded(state: Tensor, kept: torch.dtype) -> Tensor:
    return state if kept == state.dtype else state.to(kept).to(state.dtype)
