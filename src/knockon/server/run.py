"""A server from its start to its end: listening, loading, signals, draining, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from knockon.engine.prompts import load_prompt_tokenizer
from knockon.errors import KnockonError, Refused
from knockon.server.app import build_app
from knockon.server.engine_client import EngineClient
from knockon.server.metrics import Metrics
from knockon.server.prompts import PromptEncoder
from knockon.server.settings import ServerSettings
from knockon.server.state import ServerState
from knockon.startup_heap import keep_startup_objects

logger = logging.getLogger("knockon.server")
LAST_ANSWERS = 1.0  # s that clients get to hear that the engine has failed
LAST_READS = 4.0  # s that clients get to read what has been written to them


class EngineFailed(KnockonError, RuntimeError):
    """The engine ended while it was serving; the message holds the cause."""


def serve(settings: ServerSettings) -> None:
    """Serve until a signal ends it. Returns after a drained shutdown.

    The port is taken before anything is loaded, and answers ``/health`` from then on.

    Raises:
        Refused: settings, a model or a port that cannot be had.
        EngineFailed: the engine or one of its ranks died or hung.
    """
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    listener = listen(settings.host, settings.port)
    with contextlib.closing(listener):
        logger.info("listening: http://%s:%d", *_address(listener))
        asyncio.run(_serve(settings, listener))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on an address; port 0 takes a free one.

    Raises:
        Refused: an address that is taken or not this machine's.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        found = f"{host}:{port}"
        raise Refused("host and port", found, "an address to listen on", str(error)) from None
    # Accepted sockets take it over; asyncio sets it only where a socket names its protocol.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.set_inheritable(False)
    return listener


def _address(listener: socket.socket) -> tuple[str, int]:
    host, port = listener.getsockname()[:2]
    return (f"[{host}]" if ":" in host else host), port


async def _serve(settings: ServerSettings, listener: socket.socket) -> None:
    settings = dataclasses.replace(
        settings, port=listener.getsockname()[1], served_model_name=settings.model_name
    )
    metrics = Metrics()
    engine = EngineClient(settings.watchdog_timeout, metrics)
    state = ServerState(settings, engine, metrics, time.time())
    config = uvicorn.Config(
        build_app(state),
        log_config=None,
        access_log=settings.log_level == "debug",
        lifespan="off",
        http="h11",
        timeout_graceful_shutdown=int(LAST_READS) + 2,
        server_header=False,
    )
    server = _Server(config)
    signals = _Signals(state, server)
    with signals.handled():
        await engine.start(settings.engine, settings.log_level)
        tasks = [
            asyncio.create_task(_get_ready(state, listener)),
            asyncio.create_task(_leave_with_engine(engine, server)),
            asyncio.create_task(signals.drain()),
        ]
        try:
            await server.serve(sockets=[listener])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await engine.stop()
    if engine.refused:
        raise KnockonError(engine.cause)
    if engine.cause:
        raise EngineFailed(f"the engine has failed: {engine.cause}")


async def _get_ready(state: ServerState, listener: socket.socket) -> None:
    engine, named = state.engine, Path(state.settings.engine["model"])
    # Files that are here are read while the engine loads; any other name is its to look up.
    early = asyncio.ensure_future(_read_tokenizer(named)) if named.exists() else None
    await engine.settled.wait()
    if engine.capacity is None:
        return
    tokenizer = await (early or _read_tokenizer(Path(engine.config["model"])))
    if isinstance(tokenizer, Refused):
        engine.fail(str(tokenizer), refused=True)
        return
    state.encoder = PromptEncoder(tokenizer, state.settings.chat_template)
    logger.info("objects that garbage collection leaves out: %d", keep_startup_objects())
    logger.info("ready: %s at http://%s:%d", state.settings.model_name, *_address(listener))


async def _read_tokenizer(model: Path) -> Any:
    """A tokenizer, or the refusal, which may come before anyone asks for it."""
    try:
        return await asyncio.to_thread(load_prompt_tokenizer, model)
    except Refused as refused:
        return refused


async def _leave_with_engine(engine: EngineClient, server: _Server) -> None:
    await engine.failed.wait()
    if not engine.refused:
        logger.error("the engine has failed: %s", engine.cause)
    await asyncio.sleep(LAST_ANSWERS)
    await server.leave()


class _Server(uvicorn.Server):
    """Leaves signals to :class:`_Signals`."""

    async def leave(self) -> None:
        """End, and let no client that does not read hold that up."""
        self.should_exit = True
        await asyncio.sleep(LAST_READS)
        self.cut_off()

    def cut_off(self) -> None:
        """Drop every connection, with whatever was not read from it."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Signals:
    """The first SIGTERM or SIGINT drains, the second ends the process."""

    def __init__(self, state: ServerState, server: _Server) -> None:
        self.seen = 0
        self._state = state
        self._server = server
        self._first = asyncio.Event()

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """While this lasts."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        self.seen += 1
        self._state.draining = True
        self._first.set()
        if self.seen > 1:
            logger.warning("second signal: stopping at once")
            self._state.engine.kill()
            logging.shutdown()
            os._exit(128 + number)

    async def drain(self) -> None:
        """Once a signal has come: wait for the answers under way, then end the server."""
        await self._first.wait()
        state = self._state
        logger.info("draining %d requests; a second signal stops at once", state.open_requests)
        until = time.monotonic() + state.settings.drain_timeout
        while state.open_requests or state.waiting_to_encode:
            if time.monotonic() > until:
                logger.warning("%d requests cut off: drain_timeout is over", state.open_requests)
                self._server.cut_off()
                break
            await asyncio.sleep(0.02)
        await self._server.leave()
