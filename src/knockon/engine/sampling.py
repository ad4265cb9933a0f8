"""Drawing the target's token at every row of a verified block.

The order is the field's: repetition penalty, frequency and presence penalty, bad words,
temperature, top-k, top-p, min-p; then the Gumbel-max trick. No tensor is read by the host and no
shape depends on data, so the whole can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from knockon.engine.bad_words import BadWords
from knockon.engine.filters import filter_logits, temper
from knockon.engine.fused.draw import draw_kernel, draw_runs_on
from knockon.engine.noise import exponential, row_keys
from knockon.engine.penalties import Penalties
from knockon.engine.request import Request
from knockon.engine.sampling_params import SamplingParams
from knockon.rollout import order

# Logits handled at once: on a CPU what fits its cache, on a GPU what bounds the temporaries
# (about 10 times 4 bytes of each).
_CHUNK_CPU = 1 << 18
_CHUNK_GPU = 1 << 26


class SamplingRequest(NamedTuple):
    """One request's part of a batch.

    Attributes:
        params: what it asked for.
        seed: its ``params.seed``, or the one drawn for it when it arrived (``fresh_seed``).
        prompt_ids: its prompt.
        output_ids: every token it has emitted, the bonus token (verify row 0's input) included.
        bad_words: the token sequences of ``params.bad_words`` (``bad_word_tokens``).
    """

    params: SamplingParams
    seed: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()


class SamplingRow(NamedTuple):
    """One request's numbers, as :class:`SamplingBatch` holds them."""

    temperature: float
    top_k: int
    top_p: float
    log_min_p: float


def sampling_row(params: SamplingParams, vocab_size: int) -> SamplingRow:
    """The numbers of one request. Filters of a greedy request change nothing: off."""
    if params.greedy:
        return SamplingRow(0.0, 0, math.inf, -math.inf)
    return SamplingRow(
        temperature=max(params.temperature, 1e-30),
        top_k=0 if params.top_k >= vocab_size else params.top_k,
        top_p=math.inf if params.top_p >= 1 else params.top_p,
        log_min_p=-math.inf if params.min_p == 0 else math.log(params.min_p),
    )


class DrawKind(NamedTuple):
    """What has to be computed to draw for a batch; fields as those of :class:`SamplingBatch`."""

    all_greedy: bool
    max_top_k: int
    any_top_p: bool
    any_min_p: bool
    top_p_within_top_k: bool

    def widened(self) -> DrawKind:
        """One of nine kinds that draws the same: greedy, or which of three filters are on.

        Kernels ask no more; the greatest top-k only spares work where there are none.
        """
        if self.all_greedy:
            return self
        most = _WHOLE if self.max_top_k else 0
        return self._replace(max_top_k=most, top_p_within_top_k=False)

    @classmethod
    def of(cls, rows: Sequence[SamplingRow]) -> DrawKind:
        """The kind of a batch."""
        return cls(
            all_greedy=all(row.temperature == 0 for row in rows),
            max_top_k=max((row.top_k for row in rows), default=0),
            any_top_p=any(row.top_p != math.inf for row in rows),
            any_min_p=any(row.log_min_p != -math.inf for row in rows),
            top_p_within_top_k=all(row.top_k > 0 for row in rows if row.top_p != math.inf),
        )


_WHOLE = (1 << 31) - 1  # tokens of no vocabulary: a bound on every top-k


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling state of ``B`` requests, on the device; remade when the batch changes.

    Attributes:
        seed: int64 ``[B]``.
        temperature: float32 ``[B]``, 0 for greedy.
        top_k: int64 ``[B]``, 0 for off.
        top_p: float32 ``[B]``, ``inf`` for off.
        log_min_p: float32 ``[B]``, ``-inf`` for off.
        speculates: bool ``[B]``, whether proposals may be accepted.
        penalties: counts of the penalised requests, ``None`` without any.
        bad_words: banned sequences, ``None`` without any.
        all_greedy: known to the host, as are the next four; they choose what is computed.
        max_top_k: largest ``top_k``, or a bound on it.
        any_top_p: whether top-p is on for any request.
        any_min_p: whether min-p is on for any request.
        top_p_within_top_k: whether top-k is on wherever top-p is.
    """

    seed: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    speculates: Tensor
    penalties: Penalties | None
    bad_words: BadWords | None
    all_greedy: bool
    max_top_k: int
    any_top_p: bool
    any_min_p: bool
    top_p_within_top_k: bool

    @classmethod
    def build(
        cls,
        requests: Sequence[SamplingRequest],
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> SamplingBatch:
        """Gathers the requests, in batch order."""
        device = torch.device(device)
        params = [request.params for request in requests]
        rows = [sampling_row(p, vocab_size) for p in params]
        penalised = [b for b, p in enumerate(params) if p.penalised]
        penalties = None
        if penalised:
            penalties = Penalties.build(
                penalised,
                [requests[b].prompt_ids for b in penalised],
                [requests[b].output_ids for b in penalised],
                [
                    (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
                    for p in params
                    if p.penalised
                ],
                vocab_size,
                device,
            )

        def tensor(values: Sequence[float | bool], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            seed=tensor([request.seed for request in requests], torch.int64),
            temperature=tensor([row.temperature for row in rows], torch.float32),
            top_k=tensor([row.top_k for row in rows], torch.int64),
            top_p=tensor([row.top_p for row in rows], torch.float32),
            log_min_p=tensor([row.log_min_p for row in rows], torch.float32),
            speculates=tensor([p.speculation for p in params], torch.bool),
            penalties=penalties,
            bad_words=BadWords.build(
                [request.bad_words for request in requests],
                [request.output_ids for request in requests],
                vocab_size,
                device,
            ),
            **DrawKind.of(rows)._asdict(),
        )

    def record(self, tokens: Tensor, kept: Tensor) -> None:
        """Counts emitted tokens, in place.

        Args:
            tokens: int64 ``[B, w]``, as ``Accepted.tokens``.
            kept: int64 ``[B]``, how many of each row were emitted, as ``Accepted.lengths``.
        """
        if self.penalties is not None:
            self.penalties.record(tokens, kept)
        if self.bad_words is not None:
            self.bad_words.record(tokens, kept)


def sampling_of(
    requests: Sequence[Request], vocab_size: int, device: torch.device
) -> SamplingBatch:
    """What the requests ask for, from all that the host knows of them."""
    return SamplingBatch.build(
        [SamplingRequest(r.params, r.seed, r.prompt, r.output, r.bad_words) for r in requests],
        vocab_size,
        device,
    )


def sample(logits: Tensor, proposals: Tensor, positions: Tensor, batch: SamplingBatch) -> Tensor:
    """Draws one token at every row from the target's processed distribution.

    Args:
        logits: float ``[B, w, V]``; row ``i`` follows the output so far and ``d_0 … d_{i-1}``.
        proposals: int64 ``[B, w-1]``, the ``d``.
        positions: int64 ``[B, w]``, the absolute position at which each drawn token will stand.
        batch: what the requests asked for.

    Returns:
        int64 ``[B, w]``. Row ``i`` is right if all of ``d_0 … d_{i-1}`` are accepted, and is to
        be ignored otherwise (see :func:`knockon.engine.verify.accept`).
    """
    vocab_size = logits.shape[-1]
    if batch.penalties is not None or batch.bad_words is not None:
        logits = logits.to(torch.float32, copy=True)
        if batch.penalties is not None:
            batch.penalties.apply_(logits, proposals)
        if batch.bad_words is not None:
            batch.bad_words.apply_(logits, proposals)
    if batch.all_greedy:
        parts = logits.reshape(-1, vocab_size).split(_rows_at_once(logits))
        return torch.cat([order.argmax(part) for part in parts]).view(positions.shape)
    if draw_runs_on(logits):
        return draw_kernel(logits, positions, batch)
    return draw_plain(logits, positions, batch)


def draw_plain(logits: Tensor, positions: Tensor, batch: SamplingBatch) -> Tensor:
    """The twin of :func:`~knockon.engine.fused.draw.draw_kernel`, of any dtype on any device.

    Args:
        logits: ``[B, w, V]``, penalties and bad words applied.
        positions: int64 ``[B, w]``.

    Returns:
        int64 ``[B, w]``.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    size = _rows_at_once(logits)

    def per_row(values: Tensor) -> Sequence[Tensor]:
        return values[:, None].expand(positions.shape).reshape(-1).split(size)

    keys = row_keys(batch.seed[:, None], positions).reshape(-1)
    drawn = [
        _draw(part, key, temperature, top_k, top_p, log_min_p, batch)
        for part, key, temperature, top_k, top_p, log_min_p in zip(
            rows.split(size),
            keys.split(size),
            per_row(batch.temperature),
            per_row(batch.top_k),
            per_row(batch.top_p),
            per_row(batch.log_min_p),
            strict=True,
        )
    ]
    return torch.cat(drawn).view(positions.shape)


def _rows_at_once(logits: Tensor) -> int:
    budget = _CHUNK_GPU if logits.is_cuda else _CHUNK_CPU
    return max(1, budget // logits.shape[-1])


def _draw(
    logits: Tensor,
    keys: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    batch: SamplingBatch,
) -> Tensor:
    """Gumbel-max over rows of ``[N, V]``: argmax of ``logits - log E``, E unit exponentials."""
    x = temper(logits.float().masked_fill(logits.isnan(), -torch.inf), temperature)
    x = filter_logits(
        x,
        top_k,
        top_p,
        log_min_p,
        max_top_k=batch.max_top_k,
        any_top_p=batch.any_top_p,
        any_min_p=batch.any_min_p,
        top_p_within_top_k=batch.top_p_within_top_k,
    )
    noise = exponential(keys, logits.shape[-1]).log_()
    noise.masked_fill_((temperature == 0)[:, None], 0.0)
    return order.argmax(x - noise)
