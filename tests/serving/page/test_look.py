"""The page in a browser: curves of metrics, its policy, phones, light and dark, the page of routes."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.serving.conftest import Site, wait_until
from tests.serving.page.conftest import Tab
from tests.serving.test_leaving import open_request
from tests.tiers import further

pytestmark = pytest.mark.unit
POINTS = "document.querySelector('#{} polyline').getAttribute('points')"


def test_the_curves(start: Any, open_tab: Callable[..., Tab]) -> None:
    site = start(slots=2)
    site.service.hold()
    tab = open_tab(site, stops_clock=True)
    tab.page.clock.run_for(1)
    shown = "document.querySelector('#{} b').textContent === '{}'"
    for name, text in (("running", "0"), ("queued", "0"), ("blocks", "0/5")):
        tab.wait_for(shown.format(name, text))
    assert tab.one("#tokens b").text_content() == "-"  # a rate needs two samples

    body = {"prompt": [[5, 6]] * 3, "max_tokens": 40}
    connection = open_request(site, "/v1/completions", body)
    site.service.hold(30)
    site.service.wait_for(lambda: site.service.num_running == 2 and site.service.steps_allowed == 0)
    tab.page.clock.run_for(1000)
    for name, text in (("running", "2"), ("queued", "1"), ("blocks", "4/5"), ("tokens", "60")):
        tab.wait_for(shown.format(name, text))
    heights = [float(point.split(",")[1]) for point in tab.page.evaluate(POINTS.format("blocks")).split()]
    assert heights == [31.0, 31 - 30 * 4 / 5]  # from none to four fifths of the height
    connection.close()
    assert tab.one("#running svg").get_attribute("aria-label") == (
        "Running: 2 now, at most 2 in the last two minutes"
    )
    site.service.wait_for(site.service.is_idle)
    tab.page.clock.run_for(1000)
    tab.wait_for(shown.format("running", "0"))
    assert len(tab.page.evaluate(POINTS.format("running")).split()) == 3


@pytest.mark.long
def test_nothing_is_asked_while_nobody_looks(site: Site, open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(site, stops_clock=True)
    tab.page.clock.run_for(1)

    def num_asked() -> int:
        tab.page.evaluate("1")  # events of the browser are heard during a call
        return sum(url.endswith("/metrics") for url in tab.asked)

    wait_until(lambda: num_asked() == 1)
    tab.wait_for("document.querySelector('#running b').textContent === '0'")
    turn = "Object.defineProperty(document, 'hidden', {{value: {}, configurable: true}});"
    turn += "document.dispatchEvent(new Event('visibilitychange'))"
    tab.page.evaluate(turn.format("true"))
    tab.page.clock.run_for(1000)
    wait_until(lambda: num_asked() == 2)  # the one that was due
    tab.wait_for("document.querySelector('#running polyline').getAttribute('points').split(' ').length === 2")
    tab.page.clock.run_for(5000)
    assert num_asked() == 2
    tab.page.evaluate(turn.format("false"))
    tab.page.clock.run_for(1000)
    wait_until(lambda: num_asked() > 2)


@pytest.mark.parametrize("path", ["/", further("/docs")])
def test_the_policy(site: Site, open_tab: Callable[..., Tab], path: str) -> None:
    policy = site.client.get(path).headers["content-security-policy"].split("; ")
    assert policy[0] == "default-src 'none'"
    assert {"script-src 'self'", "form-action 'none'", "require-trusted-types-for 'script'"} <= set(policy)
    tab = open_tab(site, path)
    elsewhere = site.url.replace("127.0.0.1", "localhost")
    blocked = tab.page.evaluate(
        """async (elsewhere) => {
          const script = document.createElement("script");
          try { script.textContent = "window.ran = 1"; } catch {}
          document.body.append(script);
          const foreign = document.createElement("script");
          try { foreign.src = elsewhere + "/page/wire.js"; document.body.append(foreign); } catch {}
          const failed = [];
          try { document.body.innerHTML += "<b>markup</b>"; } catch { failed.push("markup"); }
          try { await fetch(elsewhere + "/health", {mode: "no-cors"}); } catch { failed.push("fetch"); }
          return [failed, window.ran === undefined];
        }""",
        elsewhere,
    )
    assert blocked == [["markup", "fetch"], True]
    assert all(re.search("Trusted|Content Security Policy", text) for text in tab.wrong), tab.wrong
    wait_until(lambda: tab.page.evaluate("1") == 1 and len(tab.wrong) >= 1)
    tab.wrong.clear()  # what the policy has said about it
    assert all(url.startswith(site.url) for url in tab.asked)


def test_a_phone(start: Any, open_tab: Callable[..., Tab]) -> None:
    site = start(window=2000)
    tab = open_tab(site, viewport={"width": 360, "height": 640}, is_mobile=True, has_touch=True)
    tab.page.wait_for_selector("#send:enabled")
    assert not tab.one("#key").is_visible()  # settings are closed at first
    tab.set("#text", "the river")
    tab.one("#send").tap()
    assert tab.answer() != ""
    height = tab.page.evaluate(
        "[turns.scrollTop + turns.clientHeight, turns.scrollHeight, turns.clientHeight]"
    )
    assert height[0] >= height[1] - 1 > height[2]  # it is longer than the screen, and its end is seen
    for selector in ("#text", "#send", "#settings summary"):
        box = tab.one(selector).bounding_box()
        assert box["x"] >= 0, selector
        assert box["y"] >= 0, selector
        assert box["x"] + box["width"] <= 360, selector
        assert box["y"] + box["height"] <= 640, selector
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
    tab.one("#settings summary").tap()
    tab.set("#max-tokens", "2.5")
    tab.one("#settings summary").tap()
    tab.set("#text", "the sea")
    tab.one("#send").tap()
    assert tab.one("#max-tokens").is_visible()  # what is wrong is shown


@pytest.mark.long  # of colors alone
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read(site: Site, open_tab: Callable[..., Tab], scheme: str) -> None:
    site.service.fail_at = 2
    tab = open_tab(site, color_scheme=scheme)
    tab.send("the river")
    tab.problem()
    brightness = {}
    for selector in (".answer", ".asked", ".turn .problem", "#send", "header a", "aside small", "figcaption"):
        text, ground = tab.page.evaluate(
            """(selector) => {
              const one = document.querySelector(selector);
              let behind = one;
              const ground = () => getComputedStyle(behind).backgroundColor;
              while (ground() === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
              const numbers = (color) => color.match(/[0-9.]+/g).map(Number);
              return [numbers(getComputedStyle(one).color), numbers(ground())];
            }""",
            selector,
        )
        light, dark = sorted((_luminance(text), _luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, selector  # WCAG 2.2, 1.4.3
        brightness[selector] = _luminance(ground)
    assert (brightness[".answer"] > 0.5) is (scheme == "light")


def _luminance(color: list[float]) -> float:
    parts = [part / 255 for part in color[:3]]
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def test_every_field_has_a_name_and_the_keyboard_reaches_it(site: Site, tab: Tab) -> None:
    tab.page.wait_for_selector("#send:enabled")
    nameless = tab.page.evaluate(
        "[...document.querySelectorAll('input, textarea, select')].filter((one) => !one.labels.length).length"
    )
    assert nameless == 0
    tab.page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(20):
        tab.page.keyboard.press("Tab")
        reached.append(tab.page.evaluate("document.activeElement.id"))
    for name in ("new", "turns", "text", "send", "temperature", "max-tokens", "seed", "system", "key"):
        assert name in reached, reached


@pytest.mark.long
def test_the_page_of_routes(site: Site, open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(site, "/docs")
    route = tab.one("details:has(code:text-is('/generation'))")
    route.locator("summary").click()
    route.locator("textarea").fill('{"prompt": "the river", "max_tokens": 3}')
    route.locator("button").click()
    tab.wait_for("[...document.querySelectorAll('pre')].some((one) => one.textContent.startsWith('200'))")
    assert len(site.service.seen) == 1
