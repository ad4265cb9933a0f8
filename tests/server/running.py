"""A real server process for tests, and clients to speak to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI

KEY = "sk-test"
NAME = "tiny"
START_LIMIT = 120.0


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class ServerProcess:
    """``knockon serve`` on a free port.

    Args:
        log: file for its stderr.
        arguments: of the command, besides the port.
    """

    def __init__(self, log: Path, *arguments: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "knockon", "serve", "--port", str(self.port), *arguments],
                stderr=stderr,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )

    def wait_ready(self) -> ServerProcess:
        """Until it serves; fails with its log if it ends before."""
        until = time.monotonic() + START_LIMIT
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise AssertionError(f"exit code {self.process.returncode}\n{self.log}")
            if self.status("/health/ready") == 200:
                return self
            time.sleep(0.1)
        raise AssertionError(f"not ready within {START_LIMIT} s\n{self.log}")

    def status(self, path: str) -> int | None:
        """The HTTP status of a path; ``None`` where nobody answers."""
        try:
            return httpx.get(self.url + path, timeout=10).status_code
        except httpx.HTTPError:
            return None

    @property
    def log(self) -> str:
        """What it wrote to stderr."""
        return self._log.read_text(errors="replace")

    @property
    def engine_pid(self) -> int:
        """The engine's process."""
        found = subprocess.run(
            ["ps", "-o", "pid=,args=", "--ppid", str(self.process.pid)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        return next(int(line.split()[0]) for line in found if "engine_process" in line)

    def client(self, **options: Any) -> OpenAI:
        """The official client; it does not try again."""
        return OpenAI(**self._options(options))

    def async_client(self, **options: Any) -> AsyncOpenAI:
        """The official client, asynchronous."""
        return AsyncOpenAI(**self._options(options))

    def http(self, **options: Any) -> httpx.Client:
        """A plain client that sends the key."""
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, **options)

    def info(self) -> dict[str, Any]:
        """``/server_info``."""
        with self.http() as http:
            found: dict[str, Any] = http.get("/server_info").json()
        return found

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        given = {"base_url": self.url + "/v1", "api_key": KEY, "max_retries": 0, "timeout": 60}
        return given | options

    def wait_idle(self) -> dict[str, Any]:
        """Until no sequence is left; the occupancy then."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            occupancy: dict[str, Any] = self.info()["occupancy"]
            if not occupancy["running"] and not occupancy["waiting"]:
                return occupancy
            time.sleep(0.05)
        raise AssertionError(f"still busy: {self.info()['occupancy']}")

    def end(self, limit: float = 30) -> int:
        """Wait for its end; the exit code."""
        return self.process.wait(limit)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def events(lines: Any) -> list[Any]:
    """The events of a stream of server-sent events, ``[DONE]`` as a string."""
    found = []
    for line in lines:
        if line.startswith("data: "):
            text = line.removeprefix("data: ")
            found.append(text if text == "[DONE]" else json.loads(text))
    return found
