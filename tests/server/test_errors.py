"""Every bad request is answered in OpenAI's shape with the right status, and others go on."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import QUEUED, RUNNING
from tests.server.running import KEY, NAME, ServerProcess, events

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
pytestmark = pytest.mark.timeout(180)


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": NAME, "messages": HELLO, "max_tokens": 2, **fields}).encode()


def complete(**fields: Any) -> bytes:
    return json.dumps({"model": NAME, "prompt": "hello", "max_tokens": 2, **fields}).encode()


BAD: dict[str, tuple[str, bytes, int, str | None]] = {
    "malformed JSON": (CHAT, b'{"messages": [', 400, None),
    "no body": (CHAT, b"", 400, None),
    "not an object": (CHAT, b"[1, 2]", 400, None),
    "a lone number": (CHAT, b"3", 400, None),
    "invalid UTF-8": (CHAT, b'{"messages": "\xff\xfe"}', 400, None),
    "half a character": (CHAT, chat(messages=[{"role": "user", "content": "\ud800"}]), 400, None),
    "deep nesting": (CHAT, b'{"messages": ' + b"[" * 100_000, 400, None),
    "messages missing": (CHAT, b'{"model": "tiny"}', 400, "messages"),
    "messages empty": (CHAT, chat(messages=[]), 400, "messages"),
    "messages of a wrong type": (CHAT, chat(messages="hi"), 400, "messages"),
    "a message without role": (CHAT, chat(messages=[{"content": "x"}]), 400, "messages.0.role"),
    "a message without content": (
        *(CHAT, chat(messages=[{"role": "user"}]), 400, "messages.0.content"),
    ),
    "an image": (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        400,
        "messages.0.content",
    ),
    "an unknown model": (CHAT, chat(model="gpt-9"), 404, "model"),
    "temperature as text": (CHAT, chat(temperature="hot"), 400, "temperature"),
    "temperature below 0": (CHAT, chat(temperature=-1), 400, "temperature"),
    "temperature not a number": (CHAT, chat(temperature=float("nan")), 400, "temperature"),
    "top_p above 1": (CHAT, chat(top_p=1.5), 400, "top_p"),
    "a seed beyond 64 bits": (CHAT, chat(seed=1 << 70), 400, "seed"),
    "an absurd n": (CHAT, chat(n=10**6), 400, "n"),
    "n of 0": (CHAT, chat(n=0), 400, "n"),
    "n beyond the queue": (CHAT, chat(n=RUNNING + QUEUED + 1), 400, "n"),
    "max_tokens of 0": (CHAT, chat(max_tokens=0), 400, "max_tokens"),
    "an absurd max_tokens": (CHAT, chat(max_tokens=10**15), 400, "max_tokens"),
    "max_tokens over the context": (CHAT, chat(max_tokens=100_000), 400, "max_tokens"),
    "an integer without end": (CHAT, b'{"n": ' + b"9" * 5000 + b"}", 400, None),
    "a prompt over the context": (COMPLETE, complete(prompt="sea " * 600), 400, "prompt"),
    "an empty prompt": (COMPLETE, complete(prompt=""), 400, "prompt"),
    "no prompts": (COMPLETE, complete(prompt=[]), 400, "prompt"),
    "an empty list of ids": (COMPLETE, complete(prompt=[[]]), 400, "prompt"),
    "an id outside the vocabulary": (COMPLETE, complete(prompt=[1, 2, 400]), 400, "prompt"),
    "too many logprobs": (COMPLETE, complete(logprobs=21), 400, "logprobs"),
    "top_logprobs alone": (CHAT, chat(top_logprobs=2), 400, "top_logprobs"),
    "stream_options alone": (CHAT, chat(stream_options={}), 400, "stream_options"),
    "an empty stop": (CHAT, chat(stop=[""]), 400, "stop"),
    "bad words of a wrong type": (CHAT, chat(bad_words=[1]), 400, "bad_words.0"),
    "logit_bias": (CHAT, chat(logit_bias={"1": 5}), 400, "logit_bias"),
    "JSON mode": (CHAT, chat(response_format={"type": "json_object"}), 400, "response_format"),
    "a forced tool": (CHAT, chat(tool_choice="required"), 400, "tool_choice"),
    "best_of": (COMPLETE, complete(best_of=3), 400, "best_of"),
    "echo": (COMPLETE, complete(echo=True), 400, "echo"),
    "speculation as a number": (CHAT, chat(speculation=0), 400, "speculation"),
    "a server's template option": (
        CHAT,
        chat(chat_template_kwargs={"chat_template": "{{ 1 }}"}),
        400,
        "chat_template_kwargs.chat_template",
    ),
    "an unknown path": ("/v1/embeddings", b"{}", 404, None),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_in_openais_shape(server: ServerProcess, name: str) -> None:
    path, body, status, param = BAD[name]
    with server.http() as http:
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    if param is not None:
        assert str(error["param"]).startswith(param)


def test_fields_that_ask_for_nothing_or_that_nobody_knows_are_passed_over(
    server: ServerProcess,
) -> None:
    harmless = {
        "logit_bias": {},
        "response_format": {"type": "text"},
        "user": "me",
        "tool_choice": "auto",
        "speculation": True,
        "best_of": 1,
        "never_heard_of": {"a": 1},
        "stop": None,
    }
    with server.http() as http:
        answer = http.post(CHAT, json=json.loads(chat(**harmless)))
    assert answer.status_code == 200, answer.text


def test_a_huge_body_is_refused_and_the_answer_heard(server: ServerProcess) -> None:
    with server.http() as http:
        answer = http.post(CHAT, content=b" " * (5 << 20))
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


def test_a_wrong_method_is_answered_405(server: ServerProcess) -> None:
    with server.http() as http:
        answer = http.get(CHAT)
    assert answer.status_code == 405
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (chat(temperature="hot"), "temperature: found 'hot', wanted a valid number"),
        (chat(n=0), "n: found 0, wanted greater than or equal to 1"),
        (chat(messages=[]), "messages: found [], wanted at least 1"),
        (b'{"model": "tiny"}', "messages: Field required"),
        (chat(speculation="x" * 10_000), "speculation: found 'xxxxxxxxxx"),
    ],
)
def test_what_was_found_is_repeated_in_short(server: ServerProcess, body: bytes, said: str) -> None:
    with server.http() as http:
        answer = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    message = answer.json()["error"]["message"]
    assert message.startswith(said)
    assert len(message) < 200


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/"])
def test_a_head_request_is_answered_as_a_get_without_its_body(
    server: ServerProcess, path: str
) -> None:
    with httpx.Client(base_url=server.url) as http:
        whole, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(whole.content))


@pytest.mark.parametrize("key", ["sk-wrong", "sk-test2", "é"])
def test_a_wrong_key_is_refused_everywhere_but_at_the_open_paths(
    server: ServerProcess, key: str
) -> None:
    headers = {"Authorization": f"Bearer {key}".encode()}
    with httpx.Client(base_url=server.url, headers=headers, timeout=30) as http:
        assert http.post(CHAT, content=chat()).status_code == 401
        for path in ("/v1/models", "/server_info", "/nowhere"):
            answer = http.get(path)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert http.post("/flush_cache").status_code == 401
        for path in ("/", "/health", "/health/ready", "/metrics"):
            assert http.get(path).status_code == 200


def test_the_official_client_raises_its_own_errors(server: ServerProcess) -> None:
    with pytest.raises(openai.AuthenticationError):
        server.client(api_key="sk-wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        server.client().chat.completions.create(model="gpt-9", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        server.client().chat.completions.create(model=NAME, messages=HELLO, max_tokens=100_000)


def test_a_full_queue_is_answered_429_with_retry_after_and_empties(server: ServerProcess) -> None:
    client = server.client()
    fill: Any = {"temperature": 0, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
    stream = client.chat.completions.create(
        model=NAME, messages=HELLO, n=RUNNING + QUEUED, stream=True, **fill
    )
    try:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model=NAME, messages=HELLO)
        assert int(caught.value.response.headers["retry-after"]) >= 1
    finally:
        stream.close()
    server.wait_idle()
    client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=2)


def test_others_keep_streaming_while_bad_requests_come(server: ServerProcess) -> None:
    asked = json.loads(chat(stream=True, max_tokens=200, temperature=0, ignore_eos=True, seed=1))
    with server.http() as http:
        alone = http.post(CHAT, json={**asked, "stream": False}).json()
    found: list[Any] = []

    def read() -> None:
        with server.http() as http, http.stream("POST", CHAT, json=asked) as answer:
            found.extend(events(answer.iter_lines()))

    reader = threading.Thread(target=read)
    reader.start()
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}) as http:
        for path, body, status, _ in list(BAD.values())[:12]:
            answer = http.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == status
    reader.join(60)
    assert found[-1] == "[DONE]"
    text = "".join(each["choices"][0]["delta"].get("content", "") for each in found[:-1])
    assert text == alone["choices"][0]["message"]["content"]


def test_text_that_is_no_unicode_is_refused_and_holds_no_place(server: ServerProcess) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
    with server.http() as http:
        for field in ("stop", "bad_words"):
            sent = json.dumps(body | {field: ["\ud800"]})
            for _ in range(3):
                answer = http.post(
                    "/v1/completions", content=sent, headers={"content-type": "application/json"}
                )
                assert answer.status_code == 400
                assert field in answer.json()["error"]["message"]
        every_place = http.post("/v1/completions", json=body | {"n": RUNNING + QUEUED})
    assert every_place.status_code == 200
