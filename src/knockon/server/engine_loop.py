"""The engine's loop: take what was sent, step, send what was gained."""

from __future__ import annotations

import dataclasses
import os
import time

import zmq

from knockon.engine.engine import StepOutput
from knockon.engine.llm import LLM
from knockon.engine.request import RequestOutput, TokenLogprobs
from knockon.errors import Refused
from knockon.server import messages as m

IDLE = 0.5  # s between looks at the parent and the ranks while nothing is to be done
SIGN_OF_LIFE = 1.0  # s


class EngineLoop:
    """Serves one socket until told to stop.

    Messages are taken between steps, without waiting while there is work; with none, the socket is
    waited for.

    Args:
        llm: loaded.
        socket: connected to the HTTP process.
        parent: its process id. The loop ends when it is no longer this process's parent.
    """

    def __init__(self, llm: LLM, socket: zmq.Socket[bytes], parent: int) -> None:
        self._llm = llm
        self._socket = socket
        self._parent = parent
        self._numbers: dict[str, int] = {}  # by the engine's own id
        self._ids: dict[int, str] = {}
        self._spoke = 0.0

    def run(self) -> None:
        """Until :class:`~messages.Stop`, or the parent's end.

        Raises:
            RankFailed: a rank died.
        """
        while os.getppid() == self._parent:
            if not self._take_messages():
                return
            if self._llm.failure is not None:
                raise self._llm.failure
            if self._ids:
                began = time.perf_counter()
                outputs = self._llm.step()
                seconds = time.perf_counter() - began
                self.send(m.Outputs([self._delta(output) for output in outputs], seconds))
            elif time.monotonic() - self._spoke >= SIGN_OF_LIFE:
                self.send(m.Alive())

    def send(self, message: m.FromEngine) -> None:
        """Queue a message; never waits."""
        self._socket.send(m.encode(message))
        self._spoke = time.monotonic()

    def _take_messages(self) -> bool:
        """All that have come; waits for one where there is nothing to do. False: leave."""
        patience = 0 if self._ids else int(IDLE * 1000)
        while self._socket.poll(patience):
            patience = 0
            message = m.decode_to_engine(self._socket.recv())
            if isinstance(message, m.Stop):
                return False
            self._take(message)
        return True

    def _take(self, message: m.ToEngine) -> None:
        if isinstance(message, m.Add):
            self._add(message)
        elif isinstance(message, m.Abort):
            for number in message.numbers:
                request_id = self._ids.pop(number, None)
                if request_id is not None:
                    del self._numbers[request_id]
                    self._llm.abort(request_id)
        elif isinstance(message, m.AskStats):
            occupancy = dataclasses.asdict(self._llm.occupancy())
            metrics = dataclasses.asdict(self._llm.metrics())
            self.send(m.Stats(message.ticket, occupancy, metrics))
        elif isinstance(message, m.AskFlush):
            self.send(m.Flushed(message.ticket, self._llm.flush_cache()))

    def _add(self, message: m.Add) -> None:
        try:
            request_id = self._llm.add(message.prompt, message.params)
        except Refused as refused:
            self.send(m.Rejected(message.number, refused.field, str(refused)))
            return
        self._ids[message.number] = request_id
        self._numbers[request_id] = message.number

    def _delta(self, output: StepOutput) -> m.Delta:
        number = self._numbers[output.request_id]
        end = None
        if output.finished is not None:
            end = _end(output.finished)
            del self._numbers[output.request_id], self._ids[number]
        infos = None if output.logprobs is None else [_info(each) for each in output.logprobs]
        return m.Delta(number, output.text, output.token_ids, infos, end)


def _end(output: RequestOutput) -> m.End:
    metrics = output.metrics
    return m.End(
        output.finish_reason,
        output.stop_reason,
        metrics.accept_lengths,
        metrics.cached_tokens,
        metrics.time_queued,
        metrics.preemptions,
    )


def _info(found: TokenLogprobs) -> m.TokenInfo:
    return m.TokenInfo(found.token_id, found.logprob, list(found.top.items()))
