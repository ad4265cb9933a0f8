"""What other servers may answer is told as a request's error, and ends nothing else."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from knockon.bench.serving.run import BenchFailed, measure
from knockon.bench.serving.settings import ServingSettings
from knockon.errors import Refused

pytestmark = pytest.mark.timeout(60)
GOOD = b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@contextmanager
def answering(bad: bytes, status: int = 200, models: bytes | None = None) -> Iterator[str]:
    """A server that answers prompts with "bad" in them so, and all others well."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = models if models is not None else b'{"data": [{"id": "m"}]}'
            self.send_response(200 if self.path == "/v1/models" else 404)
            self.end_headers()
            self.wfile.write(found)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            is_bad = b"bad" in body
            self.send_response(status if is_bad else 200)
            if status // 100 == 3:
                self.send_header("Location", "/v1/models")
            self.end_headers()
            self.wfile.write(bad if is_bad else GOOD + DONE)

        def log_message(self, *_: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def settings(url: str, folder: Path, **changes: Any) -> ServingSettings:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("good", "bad")))
    asked = {"output_len": 4, "chat": True, "warmup_requests": 0, "model": "m"} | changes
    return ServingSettings(url, prompts, **asked)


@pytest.mark.parametrize(
    "bad, error",
    [
        (b"data: {broken}\n\n" + DONE, "DecodeError"),
        (b'data: {"choices": [{"delta": {"content": NaN}}]}\n\n', "DecodeError"),
        (b'data: {"choices": {"delta": 1}}\n\n', "none of OpenAI's"),
        (b'data: {"choices": ["text"]}\n\n', "none of OpenAI's"),
        (b'data: {"usage": "many"}\n\n', "none of OpenAI's"),
        (b'data: {"usage": {"speculation": {"kept": 1}}}\n\n', "none of OpenAI's"),
        (GOOD.replace(b'"stop"', b"null"), "ended early"),
        (b"", "ended early"),
    ],
)
def test_a_stream_that_is_none_is_that_requests_error(
    tmp_path: Path, bad: bytes, error: str
) -> None:
    with answering(bad) as url:
        good, found = measure(settings(url, tmp_path)).requests
    assert good.error == "" and good.text == "a"
    assert error in found.error and "\n" not in found.error


def test_a_redirect_is_not_followed(tmp_path: Path) -> None:
    with answering(b"elsewhere", status=307) as url:
        found = measure(settings(url, tmp_path)).requests[1]
    assert found.error == "HTTP 307: elsewhere"


@pytest.mark.parametrize("models", [b"[" * 100_000, b'{"data": 3}', b"<html>", b'{"data": []}'])
def test_a_server_that_tells_no_model_is_said_so(tmp_path: Path, models: bytes) -> None:
    with (
        answering(b"", models=models) as url,
        pytest.raises(BenchFailed, match="tells no model at /v1/models: "),
    ):
        measure(settings(url, tmp_path, model=None))


def test_a_key_that_no_header_can_hold_is_a_requests_error(tmp_path: Path) -> None:
    with answering(b"") as url, pytest.raises(BenchFailed, match="no request of 2 succeeded"):
        measure(settings(url, tmp_path, api_key="key\n"))


@pytest.mark.parametrize(
    "field, value",
    [("timeout", math.inf), ("temperature", math.nan), ("top_p", math.inf), ("top_p", 0.0)],
)
def test_numbers_that_json_cannot_carry_are_refused(
    tmp_path: Path, field: str, value: float
) -> None:
    with pytest.raises(Refused, match=field):
        settings("http://127.0.0.1:1", tmp_path, **{field: value})
