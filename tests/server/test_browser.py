"""The page in a real browser: a message sent, the answer read, its speed seen; on a phone too."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from knockon.engine.llm import LLM
from knockon.engine.sampling_params import SamplingParams
from tests.server.running import KEY, NAME, ServerProcess

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
QUESTION = "Tell me of the sea, and the one there."
DESKTOP, PHONE = (1280, 800), (390, 844)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(NAMES)} is on the PATH"),
    pytest.mark.timeout(240),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless, with a fresh profile."""
    with sync_api.sync_playwright() as playwright:
        sync_api.expect.set_options(timeout=60_000)
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        launched.close()


class Page:
    """The open page, as its user finds and uses it."""

    def __init__(self, browser: Any, url: str, size: tuple[int, int] = DESKTOP) -> None:
        width, height = size
        self.tab = browser.new_page(viewport={"width": width, "height": height})
        self.faults: list[str] = []
        self.tab.on("pageerror", lambda error: self.faults.append(str(error)))
        self.tab.on("console", lambda m: m.type == "error" and self.faults.append(m.text))
        self.tab.goto(url)

    def set(self, label: str, value: str | bool) -> None:
        """Change a setting, which the panel holds."""
        self.tab.get_by_text("Settings", exact=True).click()
        field = self.tab.get_by_label(label)
        if isinstance(value, bool):
            field.set_checked(value)
        else:
            field.fill(value)
        self.tab.locator("h1").click()

    def enter(self) -> None:
        """Give the key, and be told the model."""
        model = sync_api.expect(self.tab.locator("#model"))
        model.to_contain_text("API key is missing")
        self.faults.clear()  # the console names the 401 too
        self.set("API key", KEY)
        model.to_have_text(NAME)

    def send(self, text: str) -> None:
        self.tab.get_by_label("Message").fill(text)
        self.tab.get_by_label("Message").press("Enter")

    def answered(self) -> str:
        """Wait for the end of an answer; its text."""
        sync_api.expect(self.tab.get_by_role("button", name="Send")).to_be_visible()
        text: str = self.tab.locator(".assistant").last.inner_text()
        return text

    def number(self, label: str) -> float:
        """One of the numbers shown, by what stands under it."""
        shown = self.tab.locator("#numbers div").filter(has_text=label).locator("b").inner_text()
        return float(re.sub("[^0-9.]", "", shown))

    def scrolls_sideways(self) -> bool:
        script = "document.documentElement.scrollWidth > window.innerWidth"
        return bool(self.tab.evaluate(script))


@pytest.fixture
def opened(browser: Any, server: ServerProcess) -> Iterator[Page]:
    page = Page(browser, server.url)
    page.enter()
    yield page
    page.tab.close()


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_message_is_answered_and_its_speed_is_seen(
    browser: Any, server: ServerProcess, offline: LLM, size: tuple[int, int]
) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    expected = offline.generate([messages], SamplingParams(temperature=0, max_tokens=60))[0]
    page = Page(browser, server.url, size)
    page.enter()
    assert not page.scrolls_sideways()
    page.set("Most tokens", "60")
    page.send(QUESTION)
    assert page.answered().split() == expected.text.split()
    lengths = expected.metrics.accept_lengths
    assert page.number("accept length") == pytest.approx(sum(lengths) / len(lengths), abs=0.01)
    assert page.number("tokens/s") > 0
    assert page.tab.locator("#numbers b").last.inner_text() == str(len(expected.token_ids))
    assert 0 < page.tab.locator("#steps i").count() <= len(lengths)
    assert not page.scrolls_sideways()
    assert page.tab.get_by_label("Message").bounding_box()["y"] < size[1]
    assert page.faults == []
    page.tab.close()


def test_a_chat_goes_on_without_speculation_and_begins_anew(opened: Page) -> None:
    opened.set("Most tokens", "20")
    opened.send(QUESTION)
    first = opened.answered()
    opened.set("Speculation", False)
    opened.send("And then?")
    opened.answered()
    assert opened.number("accept length") == 1
    assert opened.tab.locator(".turn.user").count() == 2
    opened.tab.get_by_role("button", name="New chat").click()
    assert opened.tab.locator(".turn").count() == 0
    opened.set("Speculation", True)
    opened.send(QUESTION)
    assert opened.answered() == first  # nothing of the old chat was sent along
    assert opened.faults == []


def test_an_answer_can_be_stopped(opened: Page, server: ServerProcess) -> None:
    opened.set("Most tokens", "400")
    opened.tab.route("**/v1/chat/completions", never_ending)
    opened.send(QUESTION)
    sync_api.expect(opened.tab.locator(".assistant").last).not_to_be_empty()
    opened.tab.get_by_role("button", name="Stop").click()
    opened.answered()
    assert opened.tab.locator(".note").last.inner_text() == "Stopped."
    assert server.wait_idle()["held_pages"] == 0


def never_ending(route: Any) -> None:
    """Send what was asked with words besides that keep the answer from ending by itself."""
    asked = route.request.post_data_json | {"ignore_eos": True, "logprobs": True}
    route.continue_(post_data=asked)


def test_an_error_is_shown_and_the_message_kept(opened: Page) -> None:
    opened.set("API key", "sk-wrong")
    opened.send(QUESTION)
    sync_api.expect(opened.tab.locator(".error")).to_contain_text("API key is missing or wrong")
    assert opened.tab.get_by_label("Message").input_value() == QUESTION
    opened.set("API key", KEY)
    opened.set("Most tokens", "5")
    opened.tab.get_by_role("button", name="Send").click()
    assert opened.answered()
