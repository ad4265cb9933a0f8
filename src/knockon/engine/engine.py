"""The engine of one rank: requests in, tokens out, one step at a time.

Every rank of a tensor-parallel run has one and is given the same calls in the same order, so all
schedule alike; what was accepted is rank 0's word (see :func:`speculate.agree`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from knockon.engine.bad_words import bad_word_tokens
from knockon.engine.checkpoints import Checkpoints
from knockon.engine.flight import Flight, Gains, Runner
from knockon.engine.logprobs import logprobs as raw_logprobs
from knockon.engine.metrics import EngineMetrics, Tally
from knockon.engine.occupancy import Capacity, Occupancy
from knockon.engine.pages import PagePool
from knockon.engine.prompt_ids import checked_prompt
from knockon.engine.request import Phase, Request, RequestMetrics, RequestOutput, TokenLogprobs
from knockon.engine.sampling_params import SamplingParams
from knockon.engine.scheduler import Scheduler
from knockon.engine.state_memory import StateBudget
from knockon.engine.step import PrefillChunk, Step
from knockon.engine.stopping import StopChecker
from knockon.engine.width import WidthPolicy
from knockon.errors import Refused


@dataclass(frozen=True)
class StepOutput:
    """What one engine step gave one request; all that it ever gave, of one that is not streamed.

    Attributes:
        text: new text, safe to stream.
        token_ids: new tokens.
        finished: the whole result, once the request has ended.
        logprobs: one entry a new token, where asked for.
    """

    request_id: str
    text: str
    token_ids: list[int]
    finished: RequestOutput | None
    logprobs: list[TokenLogprobs] | None = None


class _InFlight(NamedTuple):
    """A launched step, how many requests it verifies, and how many positions of each."""

    flight: Flight
    batch: int
    width: int


class Engine:
    """Schedules requests over a runner.

    Args:
        runner: loaded models and their KV.
        tokenizer: a ``transformers`` tokenizer.
        num_pages, max_batch_size, prefill_chunk, max_length, prefix_cache: see ``EngineConfig``.
        states: of the target's recurrent layers, as the runner holds them; ``None`` without such.
        widths: decides the verify width of each step.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Any,
        *,
        num_pages: int,
        max_batch_size: int,
        prefill_chunk: int,
        max_length: int,
        widths: WidthPolicy,
        prefix_cache: bool = True,
        states: StateBudget | None = None,
    ) -> None:
        self.runner = runner
        self.states = states
        self._checkpoints: Checkpoints | None = None
        if states is not None:
            self._checkpoints = Checkpoints(states.first_checkpoint, states.checkpoints)
            prefix_cache = prefix_cache and states.checkpoints > 0
        self.tokenizer = tokenizer
        self.widths = widths
        self.max_length = max_length
        block = runner.drafter.block_size if runner.drafter is not None else 0
        self.scheduler = Scheduler(
            PagePool(num_pages, runner.page_size, prefix_cache, self._checkpoints),
            max_batch_size,
            prefill_chunk,
            max(widths.widths[-1], block),
            max_length,
        )
        self._stops: dict[str, StopChecker] = {}
        self._tally = Tally()
        self._in_flight: deque[_InFlight] = deque()  # oldest first
        # Not handed over yet: what a step that fails half-way has gathered comes with the next.
        self._outbox: list[StepOutput] = []
        self._vocab_size = runner.target.config.vocab_size
        self._eos = runner.target.config.eos_token_ids

    @property
    def has_unfinished(self) -> bool:
        """Whether another :meth:`step` has anything to do."""
        return self.scheduler.has_unfinished

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        stream: bool = True,
    ) -> None:
        """Queue a request.

        Args:
            prompt: token ids, at least one.
            seed: ``params.seed``, or one drawn for this request.
            stream: whether steps tell what they gave it. Without, its end is told and nothing
                before; its text is then decoded once and not step by step.

        Raises:
            Refused: an empty prompt, ids outside the vocabulary, or a request that cannot fit.
        """
        request = Request(
            request_id,
            checked_prompt(prompt, self._vocab_size),
            params,
            seed,
            bad_word_tokens(self.tokenizer, params.bad_words),
            stream,
        )
        self._stops[request_id] = StopChecker(
            params, self.tokenizer, self._eos, limit=self.max_length - len(request.prompt)
        )
        try:
            self.scheduler.add(request)
        except Refused:
            del self._stops[request_id]
            raise

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, wherever it stands; ``None`` if it has already ended."""
        request = self.scheduler.abort(request_id)
        if request is None:
            return None
        return self._result(request, self._stops.pop(request_id), "abort", time.perf_counter())

    def step(self) -> list[StepOutput]:
        """Launch the scheduler's next step, and take in what the steps before it gave.

        A step is prefill chunks, then one speculative step of the decoding requests. The runner
        may leave as many in flight as its ``lag``; what those give comes with later calls.

        A step that raises (an interrupt, say) loses nothing: what it had taken in comes with the
        next, and requests whose tokens are lost on the way are computed again from where the host
        knows them to stand.
        """
        try:
            self._step()
        except BaseException:
            self._start_over()
            raise
        outputs, self._outbox = self._outbox, []
        return outputs

    def _start_over(self) -> None:
        """Forget what is in flight: the device may have gone on where the host has not followed.

        So may states have, even where each step runs to its end.
        """
        self._in_flight.clear()
        if self._checkpoints is not None:
            self._checkpoints.give_back()
        ahead = self.runner.lag > 0 or self.states is not None
        for request in self.scheduler.running[::-1]:  # so that the oldest is first again
            if ahead or request.flights or request.ahead:
                request.flights = request.ahead = 0
                self.scheduler.preempt(request)

    def _step(self) -> None:
        decoding = self.scheduler.decoding()
        # Whether the next step depends on tokens that are still in flight.
        if self._in_flight and (
            self.scheduler.with_history or self.scheduler.short_of_pages(decoding)
        ):
            self._land(0)
            decoding = self.scheduler.decoding()
        work = self.scheduler.schedule(decoding)
        if work.prefill or work.decode:
            now = time.perf_counter()
            for chunk in work.prefill:
                chunk.request.start_time = chunk.request.start_time or now
            width = self._width(work.decode)
            flight = self.runner.launch(work, width)
            self._in_flight.append(_InFlight(flight, len(work.decode), width))
            self._take_off(work, width)
            self._land(self.runner.lag)
        else:
            self._land(0)

    def _width(self, decode: Sequence[Request]) -> int:
        """The verify width of the next step: 1 where nobody in it speculates."""
        speculating = sum(request.params.speculation for request in decode)
        return self.widths.choose(len(decode), speculating) if speculating else 1

    def _take_off(self, work: Step, width: int) -> None:
        """Note what a launched step does to its requests, as far as that is known beforehand."""
        for chunk in work.prefill:
            request = chunk.request
            if request.phase is Phase.FINISHED:  # aborted by a signal's handler just now
                continue
            request.length += chunk.count
            self._register(request)
            if chunk.kept_slot >= 0:
                self._find_kept(chunk)
            if request.length in request.boundaries:
                self._keep_state(request)
            if chunk.last:
                request.phase = Phase.DECODE
                request.flights += request.is_new
        if self._checkpoints is not None:
            self._checkpoints.give_back()  # of pages that are not cached after all
        for request in work.decode:
            request.flights += 1
            request.ahead += width
        if work.decode:
            self._tally.step(len(work.decode), width, self.runner.drafter)

    def _land(self, leave: int) -> None:
        """Take in steps in flight, oldest first, until ``leave`` of them are left."""
        while len(self._in_flight) > leave:
            flight, batch, width = self._in_flight.popleft()
            landed = flight.land()
            if batch:
                self._tally.landed(flight.seconds, flight.parts)
                gained = [
                    len(own)
                    for gains in landed
                    if gains.verified
                    for request, own in zip(gains.requests, gains.tokens, strict=True)
                    if request.params.speculation
                ]
                if gained:
                    self.widths.record(batch, width, gained, flight.seconds)
            for gains in landed:
                self._take_in(gains, width)

    def _take_in(self, gains: Gains, width: int) -> None:
        """Take over what a forward gave, up to a stop, and end the requests that reach theirs.

        This runs for every request in every step: what one needs only now and then is tested here
        and done elsewhere.
        """
        outputs = self._outbox
        _, _, logits, verified = gains
        page_size, decode = self.runner.page_size, Phase.DECODE
        lengths: list[int] = []
        for row, (request, tokens) in enumerate(zip(gains.requests, gains.tokens, strict=True)):
            request.flights -= 1
            if verified:
                request.ahead -= width
            if request.phase is not decode:  # it has ended meanwhile
                continue
            stops = self._stops[request.id]
            kept = stops.take(tokens)
            if verified:
                request.length += len(tokens)
                request.accept_lengths.append(kept)
                if request.params.speculation:
                    lengths.append(kept)
            else:
                request.first_token_time = time.perf_counter()
            if kept < len(tokens):
                tokens = tokens[:kept]
            request.tokens += tokens
            found: list[TokenLogprobs] | None = None
            if logits is not None and request.params.logprobs is not None:
                rows = logits[row, :kept]
                found = token_logprobs(rows, tokens, request.params.logprobs)
                request.logprobs += found
            if stops.finish_reason is not None:
                outputs.append(self._finish(request, stops, tokens, found))
                continue
            if request.stream:
                outputs.append(StepOutput(request.id, stops.stream(), tokens, None, found))
            if request.length // page_size > request.registered:
                self._register(request)
        self._tally.accept_lengths.update(lengths)

    def metrics(self) -> EngineMetrics:
        """What was done so far. Reads the device, and takes a collective on several ranks."""
        return self._tally.snapshot(self.widths.name, self.runner.drafter)

    def capacity(self) -> Capacity:
        """What this engine was made to hold."""
        pool = self.scheduler.pool
        return Capacity(
            self.max_length,
            self.scheduler.max_batch_size,
            pool.usable,
            pool.page_size,
            self._vocab_size,
            0 if self.states is None else self.states.checkpoints,
            0 if self.states is None else self.states.bytes,
            "" if self.states is None else str(self.states.dtype).removeprefix("torch."),
        )

    def occupancy(self) -> Occupancy:
        """What it holds now."""
        scheduler = self.scheduler
        return Occupancy(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            held_pages=scheduler.pool.usable - scheduler.pool.available,
            cached_pages=scheduler.pool.cached,
            cached_states=0 if self._checkpoints is None else self._checkpoints.kept,
        )

    def flush_cache(self) -> int:
        """Forget earlier prompts, as far as no request uses their pages; how many pages."""
        return self.scheduler.pool.flush()

    def _register(self, request: Request) -> None:
        """Offer full pages below the verified length to the prefix cache."""
        full = request.length // self.runner.page_size
        if full > request.registered:
            self.scheduler.pool.register(
                request.tokens, request.pages, request.registered, request.length
            )
            request.registered = full

    def _find_kept(self, chunk: PrefillChunk) -> None:
        """Let the state that a chunk leaves aside be found under its page, if that is cached."""
        assert self._checkpoints is not None
        end = chunk.start + chunk.kept_rows
        page = chunk.request.pages[end // self.runner.page_size - 1]
        if self.scheduler.pool.is_cached(page):
            self._checkpoints.keep(page, chunk.kept_slot)

    def _keep_state(self, request: Request) -> None:
        """Keep a request's state under the page that ends where it stands, if that is cached."""
        assert self._checkpoints is not None
        page = request.pages[request.length // self.runner.page_size - 1]
        if self.scheduler.pool.is_cached(page):
            slot = self._checkpoints.reserve(page)
            if slot is not None:
                self.runner.copy_state(request.slot, slot)
                self._checkpoints.keep(page, slot)  # not before: the copying may be interrupted

    def _finish(
        self,
        request: Request,
        stops: StopChecker,
        tokens: list[int],
        found: list[TokenLogprobs] | None,
    ) -> StepOutput:
        # The last token's KV was never written, and rows past a stop were run but not kept.
        request.length = min(request.length, len(request.tokens) - 1)
        self._register(request)
        self.scheduler.finish(request)
        del self._stops[request.id]
        assert stops.finish_reason is not None
        finished = self._result(request, stops, stops.finish_reason, time.perf_counter())
        if not request.stream:
            return StepOutput(
                request.id, finished.text, finished.token_ids, finished, finished.logprobs
            )
        return StepOutput(request.id, stops.stream(), tokens, finished, found)

    def _result(
        self, request: Request, stops: StopChecker, reason: str, now: float
    ) -> RequestOutput:
        arrival = request.arrival
        metrics = RequestMetrics(
            time_queued=(request.start_time or now) - arrival,
            time_to_first_token=(request.first_token_time or now) - arrival,
            time_total=now - arrival,
            accept_lengths=request.accept_lengths,
            cached_tokens=request.cached_tokens,
            preemptions=request.preemptions,
        )
        return RequestOutput(
            id=request.id,
            prompt_token_ids=request.prompt,
            text=stops.text,
            token_ids=request.output,
            finish_reason=reason,
            stop_reason=stops.stop_reason,
            logprobs=request.logprobs if request.params.logprobs is not None else None,
            metrics=metrics,
        )


def token_logprobs(logits: Tensor, tokens: Sequence[int], n: int) -> list[TokenLogprobs]:
    """Log-probabilities of ``tokens [k]`` and of the ``n`` best, from the raw ``logits [k, V]``."""
    if not tokens:
        return []
    chosen_ids = torch.tensor([list(tokens)], device=logits.device)
    found = raw_logprobs(logits.unsqueeze(0), chosen_ids, n)
    chosen, ranks = found.chosen[0].tolist(), found.rank[0].tolist()
    top_ids, top_values = found.top_ids[0].tolist(), found.top_values[0].tolist()
    return [
        TokenLogprobs(token, chosen[i], ranks[i], dict(zip(top_ids[i], top_values[i], strict=True)))
        for i, token in enumerate(tokens)
    ]
