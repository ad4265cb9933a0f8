"""Leaving clients, signals and deaths: nothing runs on for nobody, nothing hangs."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from knockon.engine.llm import LLM
from knockon.engine.sampling_params import SamplingParams
from tests.engine.generation import TinyShelf
from tests.server.running import NAME, ServerProcess

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
pytestmark = pytest.mark.timeout(240)


def test_a_closed_stream_gives_its_pages_back(server: ServerProcess) -> None:
    stream = server.client().chat.completions.create(
        model=NAME, messages=HELLO, stream=True, **LONG
    )
    next(iter(stream))
    assert server.info()["occupancy"]["held_pages"] > 0
    stream.close()
    began = time.monotonic()
    assert server.wait_idle()["held_pages"] == 0
    assert time.monotonic() - began < 5


def test_clients_that_leave_while_queued_or_waiting_for_a_whole_answer_are_aborted(
    server: ServerProcess,
) -> None:
    body = {"model": NAME, "messages": HELLO, "max_tokens": 400, "ignore_eos": True, "n": 6}
    with raw_request(server, body):
        until = time.monotonic() + 20
        while not server.info()["occupancy"]["waiting"]:
            assert time.monotonic() < until
    assert server.wait_idle()["held_pages"] == 0
    with server.http() as http:
        metrics = http.get("/metrics").text
    assert 'knockon_requests_finished_total{reason="abort"}' in metrics


def test_metrics_tell_of_requests_pages_speculation_and_times(server: ServerProcess) -> None:
    server.client().chat.completions.create(model=NAME, messages=HELLO, max_tokens=20)
    with server.http() as http:
        text = http.get("/metrics").text
    for name in (
        "knockon_requests_running 0.0",
        "knockon_requests_waiting 0.0",
        'knockon_kv_pages{state="held"}',
        "knockon_cached_states 0.0",
        "knockon_prefix_cache_hit_tokens_total",
        'knockon_accepted_tokens_by_position_total{position="1"}',
        "knockon_verifications_total",
        "knockon_step_seconds_bucket",
        "knockon_decode_step_seconds_sum",
        'knockon_step_part_seconds_sum{part="draft"}',
        'knockon_step_part_seconds_sum{part="verify"}',
        'knockon_step_part_seconds_count{part="commit"}',
        "knockon_time_to_first_token_seconds_bucket",
        "knockon_time_per_output_token_seconds_bucket",
        "knockon_e2e_request_latency_seconds_bucket",
    ):
        assert name in text


def test_the_server_tells_the_settings_in_force(server: ServerProcess) -> None:
    info = server.info()
    engine, own = info["engine"], info["server"]
    assert engine["verify_width"] == info["metrics"]["verify_width"] > 1
    assert engine["max_model_len"] == info["capacity"]["max_length"]
    assert engine["speculative_algorithm"] == "DFLASH"
    assert None not in (engine["max_batch_size"], engine["kv_memory"], engine["prefill_chunk"])
    assert (own["port"], own["served_model_name"]) == (server.port, NAME)
    assert "api_key" not in own


def test_a_term_lets_answers_finish_and_takes_no_more(
    tiny_arguments: list[str], offline: LLM, tmp_path: Path
) -> None:
    expected = offline.generate(
        [HELLO], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    )[0]
    with ServerProcess(tmp_path / "log", *tiny_arguments) as server:
        server.wait_ready()
        client = server.client()
        stream = iter(
            client.chat.completions.create(model=NAME, messages=HELLO, stream=True, **LONG)
        )
        text = next(stream).choices[0].delta.content or ""
        server.process.send_signal(signal.SIGTERM)
        while server.status("/health/ready") == 200:
            time.sleep(0.01)
        assert server.status("/health") == 200
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(model=NAME, messages=HELLO)
        assert caught.value.status_code == 503
        text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == expected.text
        assert server.end() == 0
        assert "Traceback" not in server.log


def test_clients_that_never_read_are_cut_off_when_the_drain_is_over(
    tiny_arguments: list[str], tmp_path: Path
) -> None:
    with ServerProcess(tmp_path / "log", *tiny_arguments, "--drain-timeout", "1") as server:
        server.wait_ready()
        body = {"model": NAME, "messages": HELLO, "max_tokens": 400, "ignore_eos": True, "n": 8}
        body |= {"stream": True, "logprobs": True, "top_logprobs": 20}
        with raw_request(server, body) as unread:
            unread.recv(1)
            server.process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            assert server.end(20) == 0
            assert time.monotonic() - began < 10
        assert "1 requests cut off" in server.log
        # No connection was waited for until the last resort of the HTTP library.
        assert "timeout graceful shutdown exceeded" not in server.log
        assert "Traceback" not in server.log


def raw_request(server: ServerProcess, body: dict[str, Any]) -> socket.socket:
    """A chat asked for over a socket that takes in little by itself."""
    with server.http() as http:
        asked = http.build_request("POST", "/v1/chat/completions", json=body)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
    head += "".join(f"{k}: {v}\r\n" for k, v in asked.headers.items() if k.lower() != "host")
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", server.port))
    raw.sendall(head.encode() + b"\r\n" + asked.content)
    return raw


def test_a_second_term_stops_at_once(tiny_arguments: list[str], tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "log", *tiny_arguments) as server:
        server.wait_ready()
        engine = server.engine_pid
        stream = server.client().chat.completions.create(
            model=NAME, messages=HELLO, n=16, stream=True, **LONG
        )
        next(iter(stream))
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.end(3) == 128 + signal.SIGTERM
        wait_gone(engine)
        stream.close()


def test_a_dead_engine_fails_readiness_and_ends_the_server_with_the_cause(
    tiny_arguments: list[str], tmp_path: Path
) -> None:
    with ServerProcess(tmp_path / "log", *tiny_arguments) as server:
        server.wait_ready()
        seen = set()
        watcher = threading.Thread(target=watch, args=(server, seen))
        watcher.start()
        stream = iter(
            server.client().chat.completions.create(model=NAME, messages=HELLO, stream=True, **LONG)
        )
        next(stream)
        os.kill(server.engine_pid, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="SIGKILL"):
            list(stream)
        assert server.end(15) == 1
        watcher.join(20)
        assert 503 in seen
        assert "error: the engine has failed: the engine's process ended: SIGKILL" in server.log


def watch(server: ServerProcess, seen: set[int]) -> None:
    """Collect what readiness says until nobody answers."""
    while (status := server.status("/health/ready")) is not None:
        seen.add(status)
        time.sleep(0.05)


@pytest.mark.slow
def test_a_dead_rank_ends_the_server_with_its_name(tiny: TinyShelf, tmp_path: Path) -> None:
    arguments = ["--model-path", str(tiny.target()), "--tp-size", "2", "--dtype", "float32"]
    with ServerProcess(tmp_path / "log", *arguments, "--served-model-name", NAME) as server:
        server.wait_ready()
        answer = server.client().chat.completions.create(
            model=NAME, messages=HELLO, temperature=0, max_tokens=8
        )
        assert answer.usage is not None and answer.usage.completion_tokens > 0
        ranks = children(server.engine_pid)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        assert server.end(30) == 1
        assert "of 2 was killed by SIGKILL" in server.log
        for rank in ranks:
            wait_gone(rank)


def test_a_killed_server_leaves_no_engine_behind(tiny_arguments: list[str], tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "log", *tiny_arguments) as server:
        server.wait_ready()
        engine = server.engine_pid
        server.process.kill()
        wait_gone(engine)


def test_a_hung_engine_is_found_out(tiny_arguments: list[str], tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "log", *tiny_arguments, "--watchdog-timeout", "4") as server:
        server.wait_ready()
        os.kill(server.engine_pid, signal.SIGSTOP)
        assert server.end(30) == 1
        assert "the engine has said nothing for" in server.log


def test_what_cannot_be_loaded_or_listened_on_is_refused_with_exit_code_2(
    server: ServerProcess, tiny: TinyShelf, tmp_path: Path
) -> None:
    for arguments, said in (
        (["--model-path", str(tmp_path / "nothing")], "nothing"),
        (
            ["--model-path", str(tiny.target()), "--port", str(server.port)],
            "an address to listen on",
        ),
    ):
        with ServerProcess(tmp_path / "log", *arguments) as refused:
            assert refused.end(60) == 2
            assert said in refused.log
            assert "Traceback" not in refused.log


def children(parent: int) -> list[int]:
    """Process ids, oldest first."""
    listed = Path(f"/proc/{parent}/task").glob("*/children")
    return sorted(int(pid) for file in listed for pid in file.read_text().split())


def wait_gone(pid: int) -> None:
    """Until a process is no more (or a zombie whose parent is yet to look)."""
    until = time.monotonic() + 15
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.05)
    raise AssertionError(f"{pid} lives on")
