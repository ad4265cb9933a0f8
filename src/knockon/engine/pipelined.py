"""Runs steps without waiting for them: all that a step needs of the one before is on the device.

The host launches step ``s`` while ``s - 1`` runs, and reads the tokens of ``s - 1`` while ``s``
runs. On a GPU the whole of a speculative step is a CUDA graph, captured per (batch bucket, verify
width, kind of draw); prefill runs on the same stream, before it, as a graph where one fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from knockon.drafters.base import Drafter
from knockon.engine.device_state import DeviceState, upload
from knockon.engine.flight import Awaited, Clock, PipelinedFlight
from knockon.engine.graphs import (
    ByHand,
    Captured,
    Graphs,
    PrefillKey,
    StepKey,
    bucket_of,
    first_prefills,
    prefill_shape,
)
from knockon.engine.prefill_batch import PrefillRows, alike, cut_of, idle_row, lay_out
from knockon.engine.request import Request
from knockon.engine.sampling import (
    DrawKind,
    SamplingBatch,
    sample,
    sampling_of,
    sampling_row,
)
from knockon.engine.speculate import (
    Accept,
    DecodeState,
    Engines,
    accept_drawn,
    speculative_step,
)
from knockon.engine.state_memory import StateBudget
from knockon.engine.step import PrefillChunk, Step
from knockon.layers.attention import NULL_PAGE, plan_block
from knockon.models.target import Target

_GREEDY = DrawKind.of([])
_TIMED_REPLAYS = 8


class _Batch(NamedTuple):
    """What a decode step needs to know of its requests that changes only with them.

    Attributes:
        stays: theirs, by which a batch is known again.
        slots: int64 ``[n]`` on the device, or the bucket's that name them.
        kind: what is drawn; ``None`` where every step must build it afresh, penalties and all.
        bucket: of the graphs that serve it; ``None`` to run it eagerly.
    """

    stays: list[int]
    slots: Tensor
    kind: DrawKind | None
    bucket: int | None


class PipelinedRunner:
    """Owns the KV of target and drafter and the state of every running request.

    Args:
        target, drafter: loaded, on one device.
        page_size: positions a page.
        max_batch_size: requests computed at once.
        max_positions: positions that a request may write to, slack for its last block included.
        buckets: batch sizes that graphs are made for, ascending, up to ``max_batch_size``; larger
            batches run eagerly, and all of them without any.
        accept: see :class:`Engines`.
        most_prefill_rows: up to how many prompt tokens a prefill runs as a graph; 0 for none.
        states: of the target's recurrent layers; ``None`` where it has none.
    """

    lag = 1

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        page_size: int,
        max_batch_size: int,
        max_positions: int,
        buckets: Sequence[int] = (),
        accept: Accept = accept_drawn,
        most_prefill_rows: int = 0,
        states: StateBudget | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.page_size = page_size
        self.device = target.device
        pages = -(-max_positions // page_size)
        self.state = DeviceState(max_batch_size, pages, target.config.vocab_size, self.device)
        # Where attention reads lengths on the device, the host gives no bound; else all of a table.
        self._context = None if target.attention.reads_lengths else pages * page_size
        # Whose length and bonus token the device knows; it alone knows the newest.
        self._placed = [0] * max_batch_size  # stays, by slot
        self._slots = {
            bucket: torch.full((bucket,), self.state.idle, device=self.device) for bucket in buckets
        }
        self._in_bucket: dict[int, Sequence[int]] = {}
        self._batch: _Batch | None = None
        self.graphs = Graphs(self.device)
        self._prefill_inputs: dict[PrefillKey, tuple[Tensor, Tensor]] = {}
        self._most_prefill_rows = most_prefill_rows
        self._states = states
        # Whether graphs of prefills are to leave states aside; eager ones know when to.
        self._keeps = states is not None and states.checkpoints > 0
        self._engines = Engines(target, drafter, [], target.group, page_size, accept)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Batch sizes that graphs are made for, ascending."""
        return tuple(self._slots)

    def allocate(self, num_pages: int) -> None:
        """Make the KV, of so many pages, the null page included."""
        self._engines.allocate(num_pages, self._states)

    def launch(self, step: Step, width: int) -> PipelinedFlight:
        """See :class:`~knockon.engine.flight.Runner`."""
        clock = Clock(self.device)
        with torch.inference_mode():
            self.state.admit([chunk.request for chunk in step.prefill] + step.decode)
            for checkpoint, request in step.restored:
                self.copy_state(checkpoint, request.slot)
            fresh = [chunk for chunk in step.prefill if not chunk.revisits]
            revisiting = [chunk for chunk in step.prefill if chunk.revisits]
            groups = alike(fresh, self._most_prefill_rows) + alike(revisiting)
            parts = [self._prefill(group) for group in groups]
            awaited = [part for part in parts if part is not None]
            clock.start()
            if step.decode:
                awaited.append(self._decode(step.decode, width))
            clock.stop()
        return PipelinedFlight(awaited, clock)

    def copy_state(self, source: int, target: int) -> None:
        """See :class:`~knockon.engine.flight.Runner`."""
        self._engines.copy_state(source, target)

    def capture(self, widths: Sequence[int]) -> None:
        """Make the graphs of greedy steps for every bucket, and of the prefills met most.

        Others are made when first needed. The largest come first, since the rest then fit into the
        memory they use.
        """
        for bucket in reversed(self._slots):
            for width in sorted(widths, reverse=True):
                self._graph(StepKey(bucket, width, _GREEDY))
        for key in reversed(first_prefills(self._most_prefill_rows, len(self._placed))):
            self._prefill_graph(key)

    def time_graphs(self) -> dict[tuple[int, int], float]:
        """Seconds of every graph by ``(bucket, width)``, on idle slots: no context to read.

        The shortest of a few replays: what else the GPU does meanwhile makes some longer.
        """
        with torch.inference_mode():
            found = {}
            self._batch = None  # its bucket may be named anew
            for key in self.graphs.steps():
                graph = self._graph(key)
                self._fill(key.bucket, [])
                graph.replay()
                clocks = [Clock(self.device) for _ in range(_TIMED_REPLAYS)]
                for clock in clocks:  # all launched before any is waited for
                    clock.start()
                    graph.replay()
                    clock.stop()
                found[key.bucket, key.width] = min(clock.read() for clock in clocks)
            return found

    def rehearse(self, requests: int, rows: int, width: int) -> None:
        """Run the largest prefill and the largest step on idle slots, for their memory.

        Args:
            requests, rows: of the prefill.
        """
        with torch.inference_mode():
            idle = torch.full((requests,), self.state.idle, device=self.device)
            tokens = torch.zeros((requests, rows), dtype=torch.int64, device=self.device)
            none, all_rows = torch.zeros_like(idle), torch.full_like(idle, rows)
            where = PrefillRows(idle, none, all_rows, idle, none)
            hidden, ends = self._run_rows(where, tokens, keeps=self._keeps and rows > 1)
            self._first_tokens(hidden, ends.zero_(), idle, _GREEDY)
            self._step(idle[:1].expand(len(self._placed)).contiguous(), width, _GREEDY)

    def _decode(self, requests: Sequence[Request], width: int) -> Awaited:
        batch = self._compose(requests)
        if batch.kind is None or batch.bucket is None:
            packed, logits = self._step(batch.slots, width, batch.kind, requests)
            wanted = logits if batch.kind is None else None
            return Awaited(requests, to_host(packed), wanted, verified=True)
        packed = self._graph(StepKey(batch.bucket, width, batch.kind)).replay()
        return Awaited(requests, to_host(packed[: len(requests)]), None, verified=True)

    def _compose(self, requests: Sequence[Request]) -> _Batch:
        """What a step needs of its batch: the same as before while nobody joins or leaves."""
        stays = [r.stay for r in requests]
        if self._batch is not None and self._batch.stays == stays:
            return self._batch
        self._batch = None  # until all below is done
        self._place([r for r in requests if self._placed[r.slot] != r.stay])
        slots = [r.slot for r in requests]
        params = [r.params for r in requests]
        kind = None
        if not any(p.logprobs is not None or p.needs_history for p in params):
            kind = self._kind(requests)
        bucket = bucket_of(len(requests), self._slots)
        if kind is None or bucket is None:
            batch = _Batch(stays, upload(slots, torch.int64, self.device), kind, None)
        else:
            self._fill(bucket, slots)
            # Graphs are kept for good: whatever clients ask for, there are nine a shape.
            batch = _Batch(stays, self._slots[bucket], kind.widened(), bucket)
        self._batch = batch
        return batch

    def _fill(self, bucket: int, slots: Sequence[int]) -> None:
        """Name the slots that the graphs of a bucket are to work on."""
        if self._in_bucket.get(bucket) != slots:
            self._in_bucket.pop(bucket, None)  # an interrupt leaves them named, or to be named
            filled = (*slots, *[self.state.idle] * (bucket - len(slots)))
            self._slots[bucket].copy_(upload(filled, torch.int64, self.device))
            self._in_bucket[bucket] = slots

    def _graph(self, key: StepKey) -> Captured | ByHand:
        found = self.graphs.find(key)
        if found is None:
            slots = self._slots[key.bucket]
            named = self._in_bucket.get(key.bucket, [])
            self._fill(key.bucket, [])
            found = self.graphs.capture(key, lambda: self._step(slots, key.width, key.kind)[0])
            self._fill(key.bucket, named)
        return found

    def _prefill_graph(self, key: PrefillKey) -> Captured | ByHand:
        found = self.graphs.find(key)
        if found is None:
            where = torch.tensor([idle_row(self.state.idle)], device=self.device)
            where = where.repeat(key.requests, 1)
            tokens = where.new_zeros((key.requests, key.rows))
            self._prefill_inputs[key] = where, tokens
            rows = PrefillRows(*where.unbind(1))
            found = self.graphs.capture(
                key, lambda: self._run_rows(rows, tokens, ragged=True, keeps=self._keeps)
            )
        return found

    def _step(
        self,
        slots: Tensor,
        width: int,
        kind: DrawKind | None,
        requests: Sequence[Request] = (),
    ) -> tuple[Tensor, Tensor]:
        """One speculative step of the requests in ``slots [n]``.

        Args:
            kind: what is drawn; ``None`` to build it from ``requests``, penalties and all.

        Returns:
            int64 ``[n, width + 1]``, tokens and how many were gained, and logits ``[n, width, V]``.
        """
        state = DecodeState(
            page_table=self.state.page_table[slots],
            lengths=self.state.lengths[slots],
            bonus=self.state.bonus[slots],
            context=self._context,
            slots=slots if self._states is not None else None,
        )
        sampling = self._sampling(slots, kind, requests)
        accepted, logits = speculative_step(self._engines, state, sampling, width)
        self.state.advance(slots, accepted.lengths, accepted.bonus)
        return torch.cat([accepted.tokens, accepted.lengths.unsqueeze(1)], dim=1), logits

    def _prefill(self, chunks: Sequence[PrefillChunk]) -> Awaited | None:
        """Run chunks together; the first tokens of those that complete a new prompt.

        Either all of them revisit shared pages, or none does.
        """
        rows = max(chunk.count for chunk in chunks)
        real = sum(chunk.count for chunk in chunks)
        revisits = chunks[0].revisits
        key = None
        if not revisits:
            key = prefill_shape(len(chunks), rows, real, self._most_prefill_rows)
        where, tokens = lay_out(chunks, key or PrefillKey(len(chunks), rows), self.state.idle)
        where_tensor = upload(where, torch.int64, self.device)
        token_tensor = upload(tokens, torch.int64, self.device)
        slots = where_tensor[: len(chunks), 0]
        if key is None:
            ragged = real < rows * len(chunks)
            keeps = any(chunk.kept_slot >= 0 for chunk in chunks)
            stand = PrefillRows(*where_tensor.unbind(1))
            cut = cut_of(chunks)
            hidden, ends = self._run_rows(stand, token_tensor, ragged, revisits, keeps, cut)
        else:
            graph = self._prefill_graph(key)
            inputs = self._prefill_inputs[key]
            inputs[0].copy_(where_tensor)
            inputs[1].copy_(token_tensor)
            hidden, ends = (x[: len(chunks)] for x in graph.replay())
        ending = [i for i, chunk in enumerate(chunks) if chunk.last and chunk.request.is_new]
        if not ending:
            return None
        if len(ending) < len(chunks):
            chosen = upload(ending, torch.int64, self.device)
            hidden, ends, slots = hidden[chosen], ends[chosen], slots[chosen]
        requests = [chunks[i].request for i in ending]
        kind = None
        if not any(r.params.needs_history for r in requests):
            kind = self._kind(requests)
        drawn, logits = self._first_tokens(hidden, ends, slots, kind, requests)
        for request in requests:
            self._placed[request.slot] = request.stay
        packed = torch.stack([drawn, torch.ones_like(drawn)], dim=1)
        return Awaited(requests, to_host(packed), logits, verified=False)

    def _run_rows(
        self,
        where: PrefillRows,
        tokens: Tensor,
        ragged: bool = False,
        revisits: bool = False,
        keeps: bool = False,
        cut: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run ``tokens [n, T]`` from where they start: last hidden ``[n, H]``, where they end.

        Args:
            ragged: whether the counts are not all ``T``.
            revisits: whether nothing is to be written to pages.
            keeps: whether any state is to be left aside.
            cut: after how many rows, where the host knows and all have the same.
        """
        _, starts, counts, _, _ = where
        plan = plan_block(
            self.state.page_table[where.slots],
            self.page_size,
            starts,
            tokens.shape[1],
            self._context,
            counts=counts if ragged else None,
        )
        if self._states is not None:
            plan.states = where.states(ragged, keeps, cut)
        if revisits:
            plan.slots = torch.full_like(plan.slots, NULL_PAGE)
        layers = self.drafter.feature_layers if self.drafter is not None else ()
        output = self.target(tokens, plan, self._engines.kv, layers)
        if self.drafter is not None and output.features is not None and not revisits:
            self.drafter.observe(output.features, tokens, plan)
        last = (counts - 1).view(-1, 1, 1).expand(-1, 1, output.hidden.shape[-1])
        return output.hidden.gather(1, last).squeeze(1), starts + counts

    def _first_tokens(
        self,
        hidden: Tensor,
        ends: Tensor,
        slots: Tensor,
        kind: DrawKind | None,
        requests: Sequence[Request] = (),
    ) -> tuple[Tensor, Tensor]:
        """Draw the token after each prompt: ``[n]``, and the logits ``[n, 1, V]``."""
        logits = self.target.logits(hidden.unsqueeze(1))
        sampling = self._sampling(slots, kind, requests)
        nothing = slots.new_empty((len(slots), 0))
        drawn = sample(logits, nothing, ends.unsqueeze(1), sampling).squeeze(1)
        self.target.group.broadcast(drawn)
        self.state.place(slots, ends, drawn)
        return drawn, logits

    def _sampling(
        self, slots: Tensor, kind: DrawKind | None, requests: Sequence[Request]
    ) -> SamplingBatch:
        if kind is None:
            return sampling_of(requests, self.target.config.vocab_size, self.device)
        return self.state.sampling(slots, kind)

    def _kind(self, requests: Sequence[Request]) -> DrawKind:
        vocab_size = self.target.config.vocab_size
        return DrawKind.of([sampling_row(r.params, vocab_size) for r in requests])

    def _place(self, requests: Sequence[Request]) -> None:
        """Tell the device where requests stand that were computed before (and then preempted)."""
        if not requests:
            return
        known = [(r.slot, r.length, r.tokens[-1]) for r in requests]
        self.state.place(*upload(known, torch.int64, self.device).unbind(1))
        for request in requests:
            self._placed[request.slot] = request.stay


def to_host(x: Tensor) -> Tensor:
    """A copy in host memory, there once the stream has come this far."""
    if x.device.type == "cpu":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
