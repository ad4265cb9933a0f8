"""The engine of one rank: requests in, tokens out, one step at a time.

Every rank of a tensor-parallel run has one and is given the same calls in the same order, so all
schedule alike; what was accepted is rank 0's word (see :func:`speculate.agree`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from knockon.engine.bad_words import bad_word_tokens
from knockon.engine.logprobs import logprobs as raw_logprobs
from knockon.engine.metrics import EngineMetrics, Tally
from knockon.engine.pages import PagePool
from knockon.engine.request import Phase, Request, RequestMetrics, RequestOutput, TokenLogprobs
from knockon.engine.runner import ModelRunner
from knockon.engine.sampling_params import SamplingParams
from knockon.engine.scheduler import Scheduler
from knockon.engine.stopping import Emitted, StopChecker
from knockon.engine.width import WidthPolicy
from knockon.errors import Refused


@dataclass(frozen=True)
class StepOutput:
    """What one engine step gave one request.

    Attributes:
        text: new text, safe to stream.
        token_ids: new tokens.
        finished: the whole result, once the request has ended.
    """

    request_id: str
    text: str
    token_ids: list[int]
    finished: RequestOutput | None


class Engine:
    """Schedules requests over a runner.

    Args:
        runner: loaded models and their KV.
        tokenizer: a ``transformers`` tokenizer.
        num_pages, max_batch_size, prefill_chunk, max_length, prefix_cache: see ``EngineConfig``.
        widths: decides the verify width of each step.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Any,
        *,
        num_pages: int,
        max_batch_size: int,
        prefill_chunk: int,
        max_length: int,
        widths: WidthPolicy,
        prefix_cache: bool = True,
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.widths = widths
        self.max_length = max_length
        block = runner.drafter.block_size if runner.drafter is not None else 0
        self.scheduler = Scheduler(
            PagePool(num_pages, runner.page_size, prefix_cache),
            max_batch_size,
            prefill_chunk,
            max(widths.widths[-1], block),
            max_length,
        )
        self._stops: dict[str, StopChecker] = {}
        self._tally = Tally()
        self._vocab_size = runner.target.config.vocab_size
        self._eos = runner.target.config.eos_token_ids

    @property
    def has_unfinished(self) -> bool:
        """Whether another :meth:`step` has anything to do."""
        return self.scheduler.has_unfinished

    def add(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, seed: int
    ) -> None:
        """Queue a request.

        Args:
            prompt: token ids, at least one.
            seed: ``params.seed``, or one drawn for this request.

        Raises:
            Refused: an empty prompt, ids outside the vocabulary, or a request that cannot fit.
        """
        request = Request(
            request_id,
            checked_prompt(prompt, self._vocab_size),
            params,
            seed,
            bad_word_tokens(self.tokenizer, params.bad_words),
        )
        self.scheduler.add(request)
        self._stops[request_id] = StopChecker(
            params, self.tokenizer, self._eos, limit=self.max_length - len(request.prompt)
        )

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, wherever it stands; ``None`` if it has already ended."""
        request = self.scheduler.abort(request_id)
        if request is None:
            return None
        return self._result(request, self._stops.pop(request_id), "abort", time.perf_counter())

    def step(self) -> list[StepOutput]:
        """Run the scheduler's next step: prefill chunks, then one speculative step."""
        work = self.scheduler.schedule()
        outputs: list[StepOutput] = []
        for chunk in work.prefill:
            request = chunk.request
            request.start_time = request.start_time or time.perf_counter()
            first = self.runner.prefill(chunk)
            request.length += chunk.count
            self._register(request)
            if request.length == request.prefill_end:
                request.phase = Phase.DECODE
            if first is not None:
                request.first_token_time = time.perf_counter()
                outputs.append(self._emit(request, first.accepted.tokens[0], first.logits[0]))
        if work.decode:
            batch = len(work.decode)
            width = self.widths.choose(batch)
            began = time.perf_counter()
            accepted, logits = self.runner.decode(work.decode, width)
            gained = accepted.lengths.tolist()
            self.widths.record(batch, width, gained, time.perf_counter() - began)
            self._tally.step(batch, width, self.runner.drafter)
            for row, request in enumerate(work.decode):
                request.length += gained[row]
                tokens = accepted.tokens[row, : gained[row]]
                output = self._emit(request, tokens, logits[row], counted=True)
                outputs.append(output)
                if output.finished is None:
                    self._register(request)
        return outputs

    def metrics(self) -> EngineMetrics:
        """What was done so far. Reads the device, and takes a collective on several ranks."""
        return self._tally.snapshot(self.widths.name, self.runner.drafter)

    def _register(self, request: Request) -> None:
        """Offer full pages below the verified length to the prefix cache."""
        full = request.length // self.runner.page_size
        if full > request.registered:
            tokens = request.tokens[: full * self.runner.page_size]
            self.scheduler.pool.register(tokens, request.pages, request.registered)
            request.registered = full

    def _emit(
        self, request: Request, tokens: Tensor, logits: Tensor, counted: bool = False
    ) -> StepOutput:
        """Take over new tokens up to a stop, and end the request where it is reached.

        Args:
            tokens: ``[n]``, the tokens gained.
            logits: ``[w, V]``, row ``i`` the one that chose token ``i``.
            counted: whether they are a verification's, and enter the accept lengths.
        """
        ids = tokens.tolist()
        stops = self._stops[request.id]
        emitted = stops.add(ids)
        kept = ids[: emitted.kept]
        request.tokens += kept
        if counted:
            request.accept_lengths.append(len(kept))
            self._tally.accept_lengths[len(kept)] += 1
        if request.params.logprobs is not None:
            request.logprobs += token_logprobs(
                logits[: len(kept)], tokens[: len(kept)], request.params.logprobs
            )
        finished = self._finish(request, stops, emitted) if emitted.finish_reason else None
        return StepOutput(request.id, emitted.text, kept, finished)

    def _finish(self, request: Request, stops: StopChecker, emitted: Emitted) -> RequestOutput:
        # The last token's KV was never written, and rows past a stop were run but not kept.
        request.length = min(request.length, len(request.tokens) - 1)
        self._register(request)
        self.scheduler.finish(request)
        del self._stops[request.id]
        assert emitted.finish_reason is not None
        return self._result(request, stops, emitted.finish_reason, time.perf_counter())

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


def checked_prompt(prompt: Sequence[int], vocab_size: int) -> list[int]:
    """A prompt's token ids.

    Raises:
        Refused: none, or one outside the vocabulary.
    """
    ids = list(prompt)
    if not ids:
        raise Refused("prompt", ids, "at least one token")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise Refused("prompt token id", token, f"an integer from 0 to {vocab_size - 1}")
    return ids


def token_logprobs(logits: Tensor, tokens: Tensor, n: int) -> list[TokenLogprobs]:
    """Log-probabilities of ``tokens [k]`` and of the ``n`` best, from the raw ``logits [k, V]``."""
    if not len(tokens):
        return []
    found = raw_logprobs(logits.unsqueeze(0), tokens.unsqueeze(0), n)
    chosen, ranks = found.chosen[0].tolist(), found.rank[0].tolist()
    top_ids, top_values = found.top_ids[0].tolist(), found.top_values[0].tolist()
    return [
        TokenLogprobs(token, chosen[i], ranks[i], dict(zip(top_ids[i], top_values[i], strict=True)))
        for i, token in enumerate(tokens.tolist())
    ]
