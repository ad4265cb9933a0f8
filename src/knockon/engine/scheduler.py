"""Continuous batching: who is prefilled and who decodes in the next engine step.

First come, first served. A request is admitted once the pages of its whole prefix are there; when
a decode step needs pages that are not, the youngest request gives all of its own back and is
computed again later, so the oldest always advances and nothing can deadlock: a request that could
not finish alone is refused when it arrives.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import NamedTuple

from knockon.engine.checkpoints import Checkpoints
from knockon.engine.pages import PagePool
from knockon.engine.request import Phase, Request
from knockon.engine.step import PrefillChunk, Step
from knockon.errors import Refused

# One count for the process: engines without a prefix cache may take turns on a runner, which knows
# stays by number.
_STAYS = itertools.count(1)
# Rows of a forward that leaves a state aside on its way: graphs, and batches, take them through the
# recurrence twice. With more of them a forward for the few rows behind is the smaller cost.
_MOST_KEEPING_ROWS = 1024


class Decoding(NamedTuple):
    """Who decodes next, oldest first, and who of them lacks how many pages for the next block."""

    requests: list[Request]
    lacking: list[tuple[Request, int]]


class Scheduler:
    """Decides; it never touches a tensor.

    Args:
        pool: the KV pages.
        max_batch_size: requests in prefill or decode at once.
        prefill_chunk: prompt tokens run in one step, over all requests.
        block_rows: positions that a decode step may write past a request's length: the larger of
            the verify width and the drafter's block.
        max_length: positions that a request may reach, prompt and output.

    Attributes:
        waiting: requests that hold nothing, first come first.
        running: requests in prefill or decode, oldest first.
        with_history: how many of those draw from the tokens before, not from their logits alone.
    """

    def __init__(
        self,
        pool: PagePool,
        max_batch_size: int,
        prefill_chunk: int,
        block_rows: int,
        max_length: int,
    ) -> None:
        self.pool = pool
        self.max_batch_size = max_batch_size
        self.prefill_chunk = prefill_chunk
        self.block_rows = block_rows
        self.max_length = max_length
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.with_history = 0
        self._free_slots: list[int] = []  # below the number of slots ever held at once

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            Refused: a prompt that leaves no room for a token, or one that the pages could not hold
                even with no other request running.
        """
        prompt, cap = len(request.prompt), request.params.max_tokens
        if prompt >= self.max_length:
            raise Refused(
                "prompt length", prompt, f"at most {self.max_length - 1} tokens of the context"
            )
        most = min(prompt + cap, self.max_length)
        needed = self.pool.pages_for(most + self.block_rows)
        if needed > self.pool.usable:
            raise Refused(
                "prompt length + max_tokens",
                prompt + cap,
                f"at most {self.pool.usable * self.pool.page_size - self.block_rows} positions "
                "of KV memory",
                "Lower max_tokens or raise kv_memory.",
            )
        request.most_tokens = most
        self.waiting.append(request)

    def abort(self, request_id: str) -> Request | None:
        """Take a request out, wherever it stands; ``None`` if it is not here any more."""
        for request in [*self.waiting, *self.running]:
            if request.id == request_id:
                self.finish(request)
                return request
        return None

    def finish(self, request: Request) -> None:
        """Give back what a request holds."""
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        else:
            self._stop(request)
        request.phase = Phase.FINISHED

    def schedule(self, decoding: Decoding | None = None) -> Step:
        """Choose the next step's work and reserve its pages.

        Args:
            decoding: what :meth:`decoding` has just told, if it was asked. With forwards in flight
                it must not be short of pages.
        """
        decode = self._reserve_blocks(self.decoding() if decoding is None else decoding)
        restored: list[tuple[int, Request]] = []
        decode += self._admit(restored)
        budget = self.prefill_chunk
        chunks: list[PrefillChunk] = []
        kept: set[tuple[int, ...]] = set()
        for request in self.running:
            if request.phase is Phase.PREFILL and budget:
                chunks.append(self._chunk(request, budget, kept))
                budget -= chunks[-1].count
        return Step(chunks, decode, restored)

    def _chunk(self, request: Request, budget: int, kept: set[tuple[int, ...]]) -> PrefillChunk:
        """What of a prompt is run next, at most ``budget`` tokens.

        Args:
            kept: prefixes after which this step leaves a state aside already; added to.
        """
        start = request.length
        end = request.kept if start < request.kept else request.prefill_end
        count = min(budget, end - start)
        inside = [b for b in request.boundaries if start < b < start + count]
        whole = PrefillChunk(request, start, count)
        if not inside or self.pool.checkpoints is None:
            return whole
        # Of prompts that run at once and are the same up to there, one's pages are cached: a state
        # for each of the others would have another give way for nothing.
        prefix = tuple(request.tokens[: inside[0]])
        if prefix in kept or not self.pool.would_cache(prefix, request.pages, request.registered):
            return whole
        kept.add(prefix)
        rows = inside[0] - start
        if count > _MOST_KEEPING_ROWS:
            return PrefillChunk(request, start, rows)
        slot = self.pool.checkpoints.reserve(request.pages[inside[0] // self.pool.page_size - 1])
        return whole if slot is None else PrefillChunk(request, start, count, slot, rows)

    def decoding(self) -> Decoding:
        """Who decodes next: all but those that what is in flight will surely end.

        Every running request is looked at here, once a step.
        """
        decode, phase, rows, size = [], Phase.DECODE, self.block_rows, self.pool.page_size
        lacking = []
        for request in self.running:
            if (
                request.phase is phase
                and len(request.tokens) + request.flights < request.most_tokens
            ):
                decode.append(request)
                reach = request.length + request.ahead + rows
                if reach > len(request.pages) * size:
                    lacking.append((request, self.pool.pages_for(reach) - len(request.pages)))
        return Decoding(decode, lacking)

    def short_of_pages(self, decoding: Decoding) -> bool:
        """Whether :meth:`schedule` would have to preempt a request.

        A request may be preempted only while nothing of it is in flight: what it gains there could
        not be given to it any more.
        """
        return sum(missing for _, missing in decoding.lacking) > self.pool.available

    def _admit(self, restored: list[tuple[int, Request]]) -> list[Request]:
        """Let waiting requests run while there is room; those with nothing to prefill.

        Args:
            restored: see :class:`Step`; added to.
        """
        ready: list[Request] = []
        while self.waiting and len(self.running) < self.max_batch_size:
            request = self.waiting[0]
            cached = self.pool.match(request.tokens[: len(request.tokens) - 1])
            needed = self.pool.pages_for(request.prefill_end + self.block_rows) - len(cached)
            # Every running request may need a page soon: admitting into those would only preempt.
            reserve = len(self.running)
            fits = needed + reserve <= self.pool.available
            pages = self.pool.allocate(needed) if fits else None
            if pages is None:
                self.pool.release(cached)
                break
            request.pages = cached + pages
            request.length = len(cached) * self.pool.page_size
            request.registered = len(cached)
            request.slot = self._free_slots.pop() if self._free_slots else len(self.running)
            request.stay = next(_STAYS)
            request.phase = Phase.PREFILL
            self.running.append(self.waiting.popleft())
            self.with_history += request.params.needs_history
            # The search for a state comes last: interrupted, it leaves a request that runs.
            if self.pool.checkpoints is not None:
                self._go_on_from(self.pool.checkpoints, request, cached, restored)
            if request.length == request.prefill_end:
                request.phase = Phase.DECODE
                ready.append(request)
            if not request.preemptions:  # or it has found what it had computed itself
                request.cached_tokens = request.length
        return ready

    def _go_on_from(
        self,
        checkpoints: Checkpoints,
        request: Request,
        cached: list[int],
        restored: list[tuple[int, Request]],
    ) -> None:
        """Shorten a hit to the last checkpoint in it, and say where new ones are to be taken.

        Where the cached pages end another prompt has parted from this one, and a third may; where
        this one's full pages end, the same may come again, or go on. Its last token is always run,
        since the next comes of it, so a page that it fills is of no use to the same prompt.
        """
        found = checkpoints.deepest(cached)
        size = self.pool.page_size
        request.kept = request.length
        request.length = found.pages * size if found is not None else 0
        ends = {request.kept, (len(request.tokens) - 1) // size * size}
        request.boundaries = tuple(sorted(end for end in ends if end > request.length))
        if found is not None:
            restored.append((found.slot, request))

    def _reserve_blocks(self, decoding: Decoding) -> list[Request]:
        """Give every decoding request the pages of its next block, preempting the youngest.

        Returns:
            Those that still decode.
        """
        running = len(self.running)
        for request, missing in decoding.lacking:
            while request.phase is Phase.DECODE:
                pages = self.pool.allocate(missing)
                if pages is not None:
                    request.pages += pages
                    break
                self.preempt(self.running[-1])
        if len(self.running) == running:
            return decoding.requests
        return [request for request in decoding.requests if request.phase is Phase.DECODE]

    def preempt(self, request: Request) -> None:
        """Take a running request's pages; it is computed again later, from where it stands."""
        self._stop(request)
        request.phase = Phase.WAITING
        request.preemptions += 1
        self.waiting.appendleft(request)

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self.with_history -= request.params.needs_history
        self.pool.release(request.pages)
        self._free_slots.append(request.slot)
        request.pages = []
        request.slot = -1
        request.length = request.registered = request.kept = 0
        request.boundaries = ()
