"""Where a request's output ends: stop ids, stop strings, the cap, and what may be streamed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from knockon.engine.detokenizer import Decoder, Detokenizer
from knockon.engine.sampling_params import SamplingParams

FinishReason = Literal["stop", "length"]


class Emitted(NamedTuple):
    """What became of newly emitted tokens.

    Attributes:
        kept: how many of them belong to the output; the others are to be dropped everywhere.
        text: what may be streamed now. All pieces, joined, are the final text.
        finish_reason: ``"stop"``, ``"length"``, or ``None`` while the request goes on.
        stop_reason: the stop string or stop token id that ended it, if one did.
    """

    kept: int
    text: str
    finish_reason: FinishReason | None
    stop_reason: str | int | None


class StopChecker:
    """Follows one request's output, token by token, to its end.

    A token is tested for ending the output before it is held against the cap, so that an output
    whose last allowed token is a stop finishes with ``"stop"``. The token that ends the output is
    kept and counted. Its text is not: the text ends where the stop string begins (the first to be
    complete; of two complete at once, the longer), and a stop token has none, unless
    ``include_stop_str_in_output``.

    Args:
        params: what the request asked for.
        tokenizer: see :class:`Detokenizer`.
        eos_token_ids: the model's end-of-sequence ids, passed over with ``ignore_eos``.
        limit: most tokens of output, if that is below ``params.max_tokens`` (a full context).

    Attributes:
        token_ids: the output's tokens so far.
        finish_reason: as in :class:`Emitted`.
        stop_reason: as in :class:`Emitted`.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Decoder,
        eos_token_ids: Collection[int] = (),
        limit: int | None = None,
    ) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._include_stop = params.include_stop_str_in_output
        self._stops = tuple(params.stop)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._ends = self._stop_ids | (frozenset() if params.ignore_eos else set(eos_token_ids))
        self._limit = params.max_tokens if limit is None else min(limit, params.max_tokens)
        self._detokenizer = Detokenizer(tokenizer)
        self._text = ""
        self._undecoded: list[int] = []
        self._flushed = False
        self._streamed = 0

    @property
    def text(self) -> str:
        """The output's text so far, before any stop string."""
        ended = self.finish_reason is not None and not isinstance(self.stop_reason, str)
        if ended and not self._flushed:
            self._text += self._detokenizer.flush(self._undecoded)
            self._flushed = True
        elif self._undecoded:
            self._text += self._detokenizer.add(self._undecoded)
        self._undecoded = []
        return self._text

    @property
    def pending(self) -> str:
        """Text held back from the stream, since it may turn out to begin a stop string."""
        return self.text[self._streamed :]

    def add(self, token_ids: Sequence[int]) -> Emitted:
        """Takes the tokens of one step, and tells what may be streamed; see :meth:`take`."""
        kept = self.take(token_ids)
        return Emitted(kept, self.stream(), self.finish_reason, self.stop_reason)

    def take(self, token_ids: Sequence[int]) -> int:
        """Takes the tokens of one step; how many of them belong to the output, after its end none.

        Text is decoded token by token only where stop strings have to be found; else it waits
        until somebody asks for it.
        """
        if self.finish_reason is not None:
            return 0
        runs_on = len(self.token_ids) + len(token_ids) < self._limit
        if runs_on and not self._stops and self._ends.isdisjoint(token_ids):
            self.token_ids += token_ids
            self._undecoded += token_ids
            return len(token_ids)
        return self._take_one_by_one(token_ids)

    def _take_one_by_one(self, token_ids: Sequence[int]) -> int:
        before = len(self.token_ids)
        for token in token_ids:
            self.token_ids.append(token)
            ends = token in self._ends
            if not ends or self._include_stop:
                self._undecoded.append(token)
            if self._stops:
                piece = self._detokenizer.add(self._undecoded)
                self._undecoded = []
                if self._extend(piece):
                    break
            if ends:
                self.finish_reason = "stop"
                self.stop_reason = token if token in self._stop_ids else None
                break
            if len(self.token_ids) >= self._limit:
                self.finish_reason = "length"
                break
        return len(self.token_ids) - before

    def _extend(self, piece: str) -> bool:
        """Adds text; cuts it at the first stop string to be complete, and says whether it did."""
        start = len(self._text)
        self._text += piece
        found: tuple[int, int, str] | None = None
        for stop in self._stops:
            begin = self._text.find(stop, max(0, start - len(stop) + 1))
            if begin >= 0:
                candidate = (begin + len(stop), begin, stop)
                found = candidate if found is None else min(found, candidate)
        if found is not None:
            end, begin, self.stop_reason = found
            self._text = self._text[: end if self._include_stop else begin]
            self.finish_reason = "stop"
        return found is not None

    def stream(self) -> str:
        """The text not streamed yet, less its longest end that begins a stop string."""
        text = self.text
        held = 0
        if self._stops and self.finish_reason is None and not self._include_stop:
            longest = max(len(stop) - 1 for stop in self._stops)
            for size in range(min(longest, len(text)), 0, -1):
                end = text[-size:]
                if any(stop.startswith(end) for stop in self._stops):
                    held = size
                    break
        piece = text[self._streamed : len(text) - held]
        self._streamed += len(piece)
        return piece
