"""A real browser for the tests of the page: Chromium, where there is one, that talks to this machine only."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.serving.conftest import Site, wait_until
from tests.serving.fake import LIMIT_S

NAMES = ("chromium", "chromium-browser", "google-chrome")
# What has reached the page: a browser on a busy machine was seen to drop a key (see `Tab.send`).
COUNT_KEYS = "window.keysSeen = 0; addEventListener('keydown', () => { window.keysSeen += 1; }, true);"
KEY_S = 5.0
ARGUMENTS = ["--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"]


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Return the browser; this folder's, since its event loop stands in the way of others in this thread."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"there is no browser: none of {', '.join(NAMES)} is on PATH")
    arguments = [*ARGUMENTS, "--no-sandbox"] if os.geteuid() == 0 else ARGUMENTS
    with api.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=arguments)
        yield started
        started.close()


class Tab:
    """A tab with the page of a server, all that it asked for, and what went wrong in it.

    Args:
        context: Of playwright.
        url: The server.
        stops_clock: Whether time passes by `page.clock` only.
    """

    def __init__(self, context: Any, url: str, *, stops_clock: bool = False) -> None:
        self.asked: list[str] = []
        self.wrong: list[str] = []
        self.page = context.new_page()
        self.page.set_default_timeout(LIMIT_S * 1000)
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", self._note)
        self.page.add_init_script(COUNT_KEYS)
        if stops_clock:
            self.page.clock.install(time=0)
            self.page.clock.pause_at(1)
        self.page.goto(url)

    def _note(self, message: Any) -> None:
        # The status of a refused request is in the console as well; those the tests bring about.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.wrong.append(message.text)

    def one(self, selector: str) -> Any:
        """Return a locator, which waits until its element is there."""
        return self.page.locator(selector)

    def set(self, selector: str, value: str) -> None:
        """Fill a field, and leave it."""
        self.one(selector).fill(value)
        self.one(selector).blur()

    def wait_for(self, script: str) -> None:
        """Wait until an expression holds. The policy lets no text become a function that would wait there."""
        wait_until(lambda: self.page.evaluate(script))

    def send(self, text: str) -> None:
        """Write a text and press Enter, once the model is known.

        Chromium drops keys while it holds the first frame of a page back, and on a busy machine that may be
        after the page is ready: a key that has not reached the page is pressed again, as a reader would. One
        that has reached it is not, whatever the page made of it.
        """
        self.page.wait_for_selector("#send:enabled")
        self.one("#text").fill(text)
        seen = self.page.evaluate("window.keysSeen")
        end = time.monotonic() + LIMIT_S
        while True:
            self.one("#text").press("Enter")
            again = time.monotonic() + KEY_S
            while time.monotonic() < again:
                if self.page.evaluate("window.keysSeen") > seen:
                    return
                time.sleep(0.01)
            assert time.monotonic() < end, f"no key reaches the page: {self.one('body').inner_text()!r}"

    def wait_for_end(self) -> None:
        """Wait until nothing is generated for this page."""
        self.page.wait_for_selector("#send:visible")

    def answer(self, place: int = -1) -> str:
        """Return an answer once it is whole."""
        self.wait_for_end()
        text: str = self.one(".answer").nth(place).text_content()
        return text

    def problem(self, place: int = -1) -> str:
        """Return what an answer says that went wrong."""
        self.wait_for_end()
        text: str = self.one(".turn .problem").nth(place).text_content()
        return text


@pytest.fixture
def open_tab(browser: Any) -> Iterator[Callable[..., Tab]]:
    """Return a function that opens the page of a server in a profile of its own; keywords of playwright."""
    contexts: list[Any] = []
    tabs: list[Tab] = []

    def begin(site: Site | str, path: str = "/", *, stops_clock: bool = False, **options: Any) -> Tab:
        url = site if isinstance(site, str) else site.url
        contexts.append(browser.new_context(**options))
        tabs.append(Tab(contexts[-1], url + path, stops_clock=stops_clock))
        return tabs[-1]

    yield begin
    for context in contexts:
        context.close()
    for tab in tabs:
        assert tab.wrong == []


@pytest.fixture
def tab(open_tab: Callable[..., Tab], site: Site) -> Tab:
    return open_tab(site)
