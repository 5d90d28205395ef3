"""The page in a browser: keys, and what it says where the server refuses, fails or is gone."""

from typing import Any

import pytest

from tests.serving.conftest import Site
from tests.serving.page.conftest import Tab
from tests.tiers import further

pytestmark = pytest.mark.unit
KEY = "swordfish-on-a-stick-81"


def test_a_key(start: Any, open_tab: Any) -> None:
    site = start(options={"api_key": KEY})
    tab = open_tab(site)
    problem = tab.one("#key-problem")
    tab.wait_for("document.getElementById('key-problem').textContent !== ''")
    assert problem.text_content() == "The server asks for an API key."
    assert tab.page.evaluate("document.activeElement.id") == "key"
    assert tab.one("#send").is_disabled()

    for wrong, words in (("guess", "not the key"), ("clé secrète", "accents")):
        tab.set("#key", wrong)
        tab.wait_for(f"document.getElementById('key-problem').textContent.includes({words!r})")
    tab.one("#key").fill(f" {KEY} ")  # as it is copied from somewhere
    tab.one("#key").press("Enter")
    tab.send("the river")
    assert tab.answer() != ""
    assert problem.text_content() == ""
    tab.wait_for("document.querySelector('#running b').textContent === '0'")  # the metrics need it, too

    tab.page.reload()
    tab.send("the sea")  # the tab still knows it
    assert tab.answer() != ""
    kept = tab.page.evaluate("[JSON.stringify(localStorage), document.cookie, location.href, document.title]")
    assert not any(KEY in text for text in (*kept, *tab.asked))
    assert tab.page.evaluate("Object.values(sessionStorage)") == [KEY]
    other = open_tab(site)  # another one does not
    other.wait_for("document.getElementById('key-problem').textContent !== ''")
    assert other.one("#key").input_value() == ""
    tab.set("#key", "")
    tab.wait_for("document.getElementById('key-problem').textContent === 'The server asks for an API key.'")
    assert tab.page.evaluate("sessionStorage.length") == 0


@pytest.mark.long
def test_a_key_that_has_changed_meanwhile(start: Any, open_tab: Any) -> None:
    tab = open_tab(start(options={"api_key": KEY}))
    tab.set("#key", KEY)
    tab.page.wait_for_selector("#send:enabled")
    tab.page.evaluate("sessionStorage.setItem('colossalai.key', 'old')")
    tab.send("the river")
    assert tab.problem() == "This is not the key of the server."
    assert tab.one("#key-problem").text_content() == "This is not the key of the server."
    tab.set("#key", "")
    tab.set("#key", KEY)
    tab.page.wait_for_selector("#send:enabled")
    tab.one(".again").click()
    assert tab.answer() != ""
    assert tab.problem() == ""


@pytest.mark.long  # a failure of the engine and a server that is gone are below
def test_a_request_that_is_not_taken(site: Site, tab: Tab) -> None:
    site.service.refuse = lambda request: True
    tab.send("first")
    assert tab.problem().startswith("The server did not take this: ")
    assert "is refused by the test" in tab.problem()
    site.service.refuse = lambda request: False
    tab.send("second")
    assert tab.answer() != ""
    assert tab.problem() == ""
    shown = site.service.tokenizer.decode(site.service.seen[-1].prompt_token_ids)
    assert shown == "<|user|>second<|assistant|>"  # what has no answer is no part of the chat
    tab.send("word " * 70)
    assert "tokens, and the model's window is 64 tokens" in tab.problem()


@pytest.mark.long
def test_a_full_queue(start: Any, open_tab: Any) -> None:
    site = start(max_queue=0)
    tab = open_tab(site)
    tab.send("the river")
    assert tab.problem() == "The server is busy, its queue is full; try again in 1 second."
    site.service.max_queue = 1
    tab.one(".again").click()
    assert tab.answer() != ""
    assert tab.problem() == ""


@pytest.mark.parametrize("place", [3, further(0)])
def test_a_failure_keeps_the_text_so_far(site: Site, tab: Tab, place: int) -> None:
    site.service.fail_at = place
    tab.send("the river")
    begin = "The server failed in the middle of the answer: " if place else "The server failed: "
    assert tab.problem() == f"{begin}rank 1 has died."
    ids = site.service.answer_ids(site.service.seen[0].prompt_token_ids, place)
    assert tab.answer() == "".join(site.service.tokenizer.decode([token]) for token in ids)
    assert tab.one(".turn").get_attribute("aria-busy") is None


@pytest.mark.long
def test_an_engine_that_has_ended(site: Site, tab: Tab) -> None:
    tab.page.wait_for_selector("#send:enabled")
    site.service.stop()
    tab.send("the river")
    assert "takes nothing new now (the fake engine has ended); try again in" in tab.problem()


def test_a_server_that_ends(site: Site, tab: Tab) -> None:
    site.service.hold(2)
    tab.send("the river")
    site.service.wait_for(lambda: site.service.num_running == 1 and site.service.steps_allowed == 0)
    tab.wait_for("document.querySelector('.answer').textContent !== ''")
    site.server.stop(0.0)
    text = tab.answer()
    assert text != ""
    assert tab.one(".note").text_content().endswith("ended by the server, which stops")
    tab.send("again")
    assert tab.problem().startswith("The server cannot be reached.")
    assert tab.answer(0) == text
    tab.wait_for("document.getElementById('metrics-problem').textContent.includes('cannot be reached')")
    assert tab.one("#running b").text_content() == "-"


@pytest.mark.long
def test_a_time_limit(start: Any, open_tab: Any) -> None:
    tab = open_tab(start(options={"request_timeout_s": 0.0}))
    tab.send("the river")
    tab.wait_for_end()
    assert tab.one(".note").text_content().endswith("ended by the server's time limit")


@pytest.mark.long
def test_somebody_between_that_answers(site: Site, tab: Tab) -> None:
    """A proxy's error is no JSON; a stream that it cuts off has no end."""
    stream = 'data: {"choices": [{"index": 0, "delta": {"content": "half"}}]}\n\n'
    tab.page.route("**/v1/chat/completions", lambda route: route.fulfill(status=502, body="<h1>Bad</h1>"))
    tab.send("the")
    assert tab.problem() == "The server failed: status 502."
    tab.page.unroute("**/v1/chat/completions")
    tab.page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, body=stream))
    tab.send("the")
    assert tab.problem() == "The connection to the server broke before the end of the answer."
    assert tab.answer() == "half"


@pytest.mark.long
def test_a_server_that_comes_back(site: Site, open_tab: Any) -> None:
    tab = open_tab(site)
    tab.page.wait_for_selector("#send:enabled")
    tab.page.route("**/v1/models", lambda route: route.abort())
    tab.page.reload()
    tab.wait_for("document.getElementById('hint').textContent.includes('cannot be reached')")
    tab.page.unroute("**/v1/models")
    tab.send("the river")  # as soon as the model is known
    assert tab.answer() != ""
