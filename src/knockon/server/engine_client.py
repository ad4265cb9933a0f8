"""The engine as the HTTP process holds it: its process, its socket, and who waits for what."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from knockon.engine.occupancy import Capacity
from knockon.engine.sampling_params import SamplingParams
from knockon.server import messages as m
from knockon.server.api_error import ApiError, bad_request
from knockon.server.metrics import Metrics
from knockon.server.submission import Submission

ENGINE = "knockon.server.engine_process"  # started with the socket and this process's id
STOP_GRACE = 10.0  # s that the engine may take to close when told to


class EngineState(Enum):
    """What can be asked of the engine."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


class EngineClient:
    """Starts the engine's process, hands it sequences, and spreads what comes back.

    Args:
        watchdog_timeout: seconds of silence, once loaded, after which the engine counts as hung.
        metrics: told of every step and every sequence's end.
    """

    def __init__(self, watchdog_timeout: float, metrics: Metrics) -> None:
        self.state = EngineState.LOADING
        self.cause = ""
        self.refused = False
        self.capacity: Capacity | None = None
        self.config: dict[str, Any] = {}
        self.environment: dict[str, Any] = {}
        self.sizes: dict[str, Any] = {}
        self.settled = asyncio.Event()  # READY or FAILED
        self.failed = asyncio.Event()
        self._watchdog_timeout = watchdog_timeout
        self._metrics = metrics
        self._numbers = itertools.count()
        self._tickets = itertools.count()
        self._submissions: dict[int, Submission] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._heard = 0.0
        self._stopping = False
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0

    @property
    def in_flight(self) -> int:
        """Sequences handed over that have not ended."""
        return len(self._submissions)

    @property
    def pid(self) -> int | None:
        """The engine's process."""
        return self._process.pid if self._process is not None else None

    async def start(self, config: dict[str, Any], log_level: str) -> None:
        """Start the process; loading goes on behind (see ``settled``)."""
        self._folder = tempfile.TemporaryDirectory(prefix="knockon-", ignore_cleanup_errors=True)
        address = f"ipc://{Path(self._folder.name) / 'engine'}"
        self._socket.bind(address)
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        # -P: the import path arrives whole in PYTHONPATH. A group of its own: a terminal's Ctrl-C
        # is this process's to answer.
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", ENGINE),
            *(address, str(os.getpid())),
            stdin=asyncio.subprocess.DEVNULL,
            env=environment,
            process_group=0,
        )
        self._send(m.Load(config, log_level))
        self._tasks = [
            asyncio.create_task(self._receive()),
            asyncio.create_task(self._watch_process()),
            asyncio.create_task(self._watch_silence()),
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    def submit(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        arrival: float,
    ) -> Submission:
        """Hand over sequences. The caller closes the submission, whatever happens."""
        numbers = [next(self._numbers) for _ in prompts]
        submission = Submission(numbers, arrival, self._leave)
        try:
            for number, prompt, each in zip(numbers, prompts, params, strict=True):
                self._submissions[number] = submission
                self._send(m.Add(number, prompt, each))
        except BaseException:  # the caller gets nothing that it could close
            submission.close()
            raise
        return submission

    async def stats(self, timeout: float) -> m.Stats | None:
        """Occupancy and metrics, after the step under way; ``None`` where that takes too long."""
        answer: m.Stats | None = await self._ask(m.AskStats, timeout)
        return answer

    async def flush_cache(self, timeout: float) -> int | None:
        """Forget cached prompts: how many pages; ``None`` where no answer came in time."""
        answer: m.Flushed | None = await self._ask(m.AskFlush, timeout)
        return answer.pages if answer is not None else None

    async def stop(self) -> None:
        """End the engine: asked first, then killed."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            if self.state is EngineState.READY:
                self._send(m.Stop())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), STOP_GRACE)
            self.kill()
            await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self._context.term()
        if self._folder is not None:
            self._folder.cleanup()

    def kill(self) -> None:
        """End the engine now; its ranks notice and follow."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._folder is not None:
            self._folder.cleanup()

    def fail(self, cause: str, refused: bool = False) -> None:
        """The engine can serve no more: tell everyone who waits. The first cause stays."""
        if self.state is EngineState.FAILED:
            return
        self.state, self.cause, self.refused = EngineState.FAILED, cause, refused
        error = ApiError(500, f"the engine has failed: {first_line(cause)}", code="engine_failed")
        for submission in set(self._submissions.values()):
            submission.fail(error)
        self._submissions.clear()
        self.settled.set()
        self.failed.set()

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None and not self._stopping:
            self.fail(f"its link broke: {task.exception()!r}")

    def _send(self, message: m.ToEngine) -> None:
        # Queued at once: the socket has no high-water mark. The future is of no interest.
        self._socket.send(m.encode(message))

    async def _ask(self, kind: type[m.AskStats] | type[m.AskFlush], timeout: float) -> Any:
        if self.state is not EngineState.READY:
            return None
        ticket = next(self._tickets)
        self._asked[ticket] = asyncio.get_running_loop().create_future()
        self._send(kind(ticket))
        try:
            return await asyncio.wait_for(self._asked[ticket], timeout)
        except TimeoutError:
            return None
        finally:
            del self._asked[ticket]

    def _leave(self, numbers: list[int]) -> None:
        running = [n for n in numbers if self._submissions.pop(n, None) is not None]
        if running and self.state is EngineState.READY and not self._stopping:
            self._send(m.Abort(running))
            self._metrics.aborted(len(running))

    async def _receive(self) -> None:
        while True:
            message = m.decode_from_engine(await self._socket.recv())
            self._heard = time.monotonic()
            if isinstance(message, m.Outputs):
                self._spread(message)
            elif isinstance(message, m.Stats | m.Flushed):
                asked = self._asked.get(message.ticket)
                if asked is not None and not asked.done():
                    asked.set_result(message)
            elif isinstance(message, m.Rejected):
                submission = self._submissions.pop(message.number, None)
                if submission is not None:
                    submission.fail(bad_request(message.text, message.field))
            elif isinstance(message, m.Ready):
                self.capacity, self.config = message.capacity, message.config
                self.environment, self.sizes = message.environment, message.sizes
                self.state = EngineState.READY
                self.settled.set()
            elif isinstance(message, m.Failed):
                self.fail(message.text, message.refused)

    def _spread(self, outputs: m.Outputs) -> None:
        self._metrics.stepped(outputs.seconds)
        for delta in outputs.deltas:
            submission = self._submissions.get(delta.number)
            if submission is None:  # left meanwhile
                continue
            submission.deliver(delta)
            self._metrics.gained(submission, delta)
            if delta.end is not None:
                del self._submissions[delta.number]

    async def _watch_process(self) -> None:
        assert self._process is not None
        status = await self._process.wait()
        await asyncio.sleep(0.2)  # its last words may be on the way
        if not self._stopping:
            how = f"exit code {status}" if status >= 0 else signal.Signals(-status).name
            self.fail(f"the engine's process ended: {how}")

    async def _watch_silence(self) -> None:
        await self.settled.wait()
        while self.state is EngineState.READY:
            await asyncio.sleep(min(1.0, self._watchdog_timeout / 4))
            silent = time.monotonic() - self._heard
            if silent > self._watchdog_timeout:
                self.fail(f"the engine has said nothing for {silent:.0f} s")


def first_line(text: str) -> str:
    """The line of an error that says most: the last of a traceback, else the first."""
    lines = [line for line in text.strip().splitlines() if line.strip()] or [""]
    return lines[-1] if lines[0].startswith("Traceback") else lines[0]
