"""Runs forwards: the one place where requests become tensors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from knockon.drafters.base import Drafter
from knockon.engine.flight import Gains, Landed
from knockon.engine.part_times import PartTimes
from knockon.engine.request import Request
from knockon.engine.sampling import SamplingBatch, sample, sampling_of
from knockon.engine.speculate import (
    Accept,
    DecodeState,
    Engines,
    accept_drawn,
    speculative_step,
)
from knockon.engine.state_memory import StateBudget
from knockon.engine.step import PrefillChunk, Step
from knockon.engine.verify import Accepted, accept
from knockon.layers.attention import LONE_MULTIPLE, NULL_PAGE, plan_block
from knockon.layers.recurrent_state import Kept, StateRows
from knockon.models.target import Target


class FirstToken(NamedTuple):
    """The token after a prompt, as :class:`Accepted` of width 1, and the logits ``[1, 1, V]``."""

    accepted: Accepted
    logits: Tensor


class ModelRunner:
    """Runs each step to its end: what a CPU is best served with.

    It owns the KV of target and drafter and the state of the decoding batch.

    Args:
        target, drafter: loaded, on one device.
        num_pages: KV pages, the null page included.
        page_size: positions a page.
        accept: see :class:`Engines`.
        states: of the target's recurrent layers; ``None`` where it has none.
    """

    lag = 0

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        num_pages: int,
        page_size: int,
        accept: Accept = accept_drawn,
        states: StateBudget | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.page_size = page_size
        self._engines = Engines(target, drafter, [], target.group, page_size, accept)
        self._engines.allocate(num_pages, states)
        self._positions = num_pages * page_size
        self._recurrent = states is not None
        self._batch: tuple[tuple[str, int], ...] = ()
        self._sampling: SamplingBatch | None = None

    def launch(self, step: Step, width: int) -> Landed:
        """See :class:`~knockon.engine.flight.Runner`; everything is there on return."""
        gains = []
        for checkpoint, request in step.restored:
            self.copy_state(checkpoint, request.slot)
        for chunk in step.prefill:
            first = self.prefill(chunk)
            if first is not None:
                tokens = first.accepted.tokens[0].tolist()
                gains.append(Gains([chunk.request], [tokens], first.logits, verified=False))
        began = time.perf_counter()
        parts = PartTimes()
        if step.decode:
            accepted, logits = self.decode(step.decode, width, parts)
            rows = zip(accepted.tokens.tolist(), accepted.lengths.tolist(), strict=True)
            kept = [tokens[:gained] for tokens, gained in rows]
            gains.append(Gains(step.decode, kept, logits, verified=True))
        # On a GPU a part has only been launched when the next begins: its time is not known.
        told = parts.seconds if self.target.device.type == "cpu" else ()
        return Landed(gains, time.perf_counter() - began, told)

    @torch.inference_mode()
    def prefill(self, chunk: PrefillChunk) -> FirstToken | None:
        """Run one chunk; writes target and draft KV.

        Returns:
            The first token, if this chunk completes the prompt of a request that has none yet.
        """
        request = chunk.request
        end = chunk.start + chunk.count
        tokens = torch.tensor([request.tokens[chunk.start : end]], device=self.target.device)
        plan = plan_block(
            self._page_table([request]),
            self.page_size,
            torch.tensor([chunk.start], device=self.target.device),
            chunk.count,
            end,
            first_slot=self._first_slot([request]),
            states=self._states([request], may_begin=chunk.start == 0, chunk=chunk),
        )
        if chunk.revisits:
            plan.slots = torch.full_like(plan.slots, NULL_PAGE)
        layers = self.drafter.feature_layers if self.drafter is not None else ()
        output = self.target(tokens, plan, self._engines.kv, layers)
        if self.drafter is not None and output.features is not None and not chunk.revisits:
            self.drafter.observe(output.features, tokens, plan)
        if not chunk.last or not request.is_new:
            return None
        logits = self.target.logits(output.hidden[:, -1:])
        sampling = sampling_of([request], self.target.config.vocab_size, self.target.device)
        nothing = tokens.new_empty((1, 0))
        drawn = sample(logits, nothing, plan.positions[:, -1:] + 1, sampling)
        self.target.group.broadcast(drawn)
        return FirstToken(accept(nothing, drawn), logits)

    @torch.inference_mode()
    def decode(
        self, requests: Sequence[Request], width: int, parts: PartTimes
    ) -> tuple[Accepted, Tensor]:
        """One speculative step for the batch: what was accepted, and the logits ``[B, w, V]``."""
        device = self.target.device
        lengths = [request.length for request in requests]
        states = self._states(requests)
        state = DecodeState(
            page_table=self._page_table(requests),
            lengths=torch.tensor(lengths, device=device),
            bonus=torch.tensor([request.tokens[-1] for request in requests], device=device),
            context=max(lengths),
            first_slot=self._first_slot(requests),
            slots=None if states is None else states.slots,
        )
        # Counts of penalised tokens are carried on; whatever else happened makes them afresh.
        batch = tuple((request.id, len(request.tokens)) for request in requests)
        if self._sampling is None or batch != self._batch:
            self._sampling = sampling_of(requests, self.target.config.vocab_size, device)
        self._batch = ()  # an interrupted step may have counted tokens that nobody received
        accepted, logits = speculative_step(
            self._engines, state, self._sampling, width, parts.part_ended
        )
        self._sampling.record(accepted.tokens, accepted.lengths)
        self._batch = tuple(
            (request.id, len(request.tokens) + gained)
            for request, gained in zip(requests, accepted.lengths.tolist(), strict=True)
        )
        return accepted, logits

    def _first_slot(self, requests: Sequence[Request]) -> int | None:
        """Where the context of a lone request can be read in place, if its pages lie in a row.

        Attention reads whole multiples of ``LONE_MULTIPLE``, masked past the request's rows: they
        must lie inside the KV arrays.
        """
        if len(requests) > 1:
            return None
        pages = requests[0].pages
        if pages != list(range(pages[0], pages[0] + len(pages))):
            return None
        first = pages[0] * self.page_size
        reach = -(-len(pages) * self.page_size // LONE_MULTIPLE) * LONE_MULTIPLE
        return first if first + reach <= self._positions else None

    def copy_state(self, source: int, target: int) -> None:
        """See :class:`~knockon.engine.flight.Runner`."""
        self._engines.copy_state(source, target)

    def _states(
        self,
        requests: Sequence[Request],
        may_begin: bool = False,
        chunk: PrefillChunk | None = None,
    ) -> StateRows | None:
        if not self._recurrent:
            return None
        slots = torch.tensor([request.slot for request in requests], device=self.target.device)
        kept = None
        if chunk is not None and chunk.kept_slot >= 0:
            aside = torch.tensor([chunk.kept_slot, chunk.kept_rows], device=self.target.device)
            kept = Kept(aside[:1], aside[1:], chunk.kept_rows)
        return StateRows(slots, may_begin=may_begin, kept=kept)

    def _page_table(self, requests: Sequence[Request]) -> Tensor:
        """``[B, P]``, as wide as the longest request here needs, the rest the null page."""
        width = max(len(request.pages) for request in requests)
        rows = [request.pages + [NULL_PAGE] * (width - len(request.pages)) for request in requests]
        return torch.tensor(rows, device=self.target.device)
