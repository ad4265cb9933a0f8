"""Whatever the API's own schema lets through, no answer is a server error."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.server.running import KEY, ServerProcess

HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_request_is_answered_by_a_server_error(server: ServerProcess) -> None:
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json", headers=HEADERS)
    seen = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        seen.add(operation.path)

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            body = case.body
            if isinstance(body, dict) and isinstance(body.get("max_tokens"), int | None):
                body["max_tokens"] = min(body.get("max_tokens") or 2, 2)  # this is no load test
            answer = case.call(headers=HEADERS)
            assert answer.status_code < 500, answer.text
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

        check()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/flush_cache"} <= seen
    assert server.wait_idle()["held_pages"] == 0
    assert "Traceback" not in server.log
