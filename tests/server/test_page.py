"""The built-in page is one file that asks nothing of the outside."""

from __future__ import annotations

import re
from importlib.resources import files

from tests.server.running import ServerProcess

PAGE = files("knockon.server").joinpath("page.html").read_text("utf-8")


def test_the_page_loads_nothing_from_elsewhere() -> None:
    assert re.findall(r"(?:https?:)?//[a-z]", PAGE) == []
    assert re.findall(r"(?:src|href)=\"(?!data:)", PAGE) == []
    assert "@import" not in PAGE and "url(" not in PAGE


def test_the_page_fits_a_phone_and_shows_what_it_promises() -> None:
    assert 'name="viewport" content="width=device-width' in PAGE
    for shown in ("tokens/s", "accept length"):
        assert shown in PAGE


def test_the_server_answers_with_it_and_lets_it_speak_to_itself_alone(
    server: ServerProcess,
) -> None:
    with server.http() as http:
        answer = http.get("/")
    assert answer.text == PAGE
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
