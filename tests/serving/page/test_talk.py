"""The page in a browser: chat and plain texts, streaming, stop, settings, texts that look like markup."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.serving.conftest import Site, wait_until
from tests.serving.fake import FakeService, make_tokenizer
from tests.serving.page.conftest import Tab
from tests.tiers import further

pytestmark = pytest.mark.unit
MARKUP = '<img src=x onerror="window.ran = 1"><script>window.ran = 1</script><b>bold</b> & &lt;'


def text_of(site: Site, place: int = -1) -> str:
    """Return what the fake engine answers to a request that it has seen."""
    request = site.service.seen[place]
    ids = site.service.answer_ids(request.prompt_token_ids, request.params.max_tokens)
    return "".join(site.service.tokenizer.decode([token]) for token in ids)


def prompt_of(service: FakeService, place: int = -1) -> str:
    return str(service.tokenizer.decode(service.seen[place].prompt_token_ids))


def test_a_chat_with_settings(site: Site, tab: Tab) -> None:
    tab.set("#max-tokens", "9")
    tab.set("#seed", "7")
    tab.set("#temperature", "1.3")
    tab.set("#system", "be short")
    tab.send("the river")
    assert tab.answer() == text_of(site) != ""
    params = site.service.seen[0].params
    assert (params.max_tokens, params.seed, params.temperature) == (9, 7, 1.3)
    assert prompt_of(site.service) == "<|system|>be short<|user|>the river<|assistant|>"
    note = tab.one(".note").text_content()
    assert note.startswith("9 tokens, ")
    assert note.endswith("ended at max tokens")

    first = tab.answer()
    tab.set("#system", "")
    tab.send("and then?")
    assert tab.answer() == text_of(site)
    history = f"<|user|>the river<|assistant|>{first}<|user|>and then?<|assistant|>"
    assert prompt_of(site.service) == history
    tab.set("#seed", "")
    tab.one(".again >> visible=true").click()  # of the last answer alone
    wait_until(lambda: len(site.service.seen) == 3)
    assert tab.answer() == text_of(site)
    assert prompt_of(site.service) == history
    assert site.service.seen[2].params.seed is None

    tab.one("#new").click()
    assert tab.one(".turn").count() == 0
    tab.send("the sea")
    tab.answer()
    assert prompt_of(site.service) == "<|user|>the sea<|assistant|>"


def test_a_model_without_a_chat_template_continues_texts(start: Any, open_tab: Any, tmp_path: Any) -> None:
    site = start(tokenizer=make_tokenizer(tmp_path, template=None))
    assert site.client.get("/v1/models").json()["data"][0]["has_chat_template"] is False
    tab = open_tab(site)
    tab.wait_for("document.body.classList.contains('plain')")
    assert not tab.one("#system").is_visible()
    tab.set("#max-tokens", "3")
    tab.send("the river\n goes")
    first = tab.answer()
    assert first == text_of(site)
    assert prompt_of(site.service) == "the river\n goes"
    tab.one(".again").click()
    wait_until(lambda: len(site.service.seen) == 2)
    assert tab.answer() == first + text_of(site)
    assert prompt_of(site.service) == "the river\n goes" + first
    tab.set("#max-tokens", "")  # as many as fit
    tab.send("sea")
    tab.answer()
    assert site.service.seen[2].params.max_tokens == 64 - len(site.service.seen[2].prompt_token_ids)


@pytest.mark.long  # the next test sees a part of an answer
def test_tokens_are_shown_as_they_come(site: Site, tab: Tab) -> None:
    site.service.hold(1)
    tab.set("#max-tokens", "4")
    tab.send("the")
    seen = []
    for place in range(1, 4):
        site.service.wait_for(lambda: site.service.steps_allowed == 0)
        whole = text_of(site)
        ids = site.service.answer_ids(site.service.seen[0].prompt_token_ids, place)
        seen.append("".join(site.service.tokenizer.decode([token]) for token in ids))
        tab.wait_for(f"document.querySelector('.answer').textContent === {seen[-1]!r}")
        assert tab.one(".turn").get_attribute("aria-busy") == "true"
        site.service.hold(1)
    assert tab.answer() == whole
    assert len(set(seen)) == 3
    assert tab.one(".turn").get_attribute("aria-busy") is None


@pytest.mark.parametrize(
    "how", ["button", *(pytest.param(how, marks=pytest.mark.long) for how in ("key", "new"))]
)
def test_stop_gives_the_blocks_back(site: Site, tab: Tab, how: str) -> None:
    site.service.hold(3)
    tab.send("the river")
    site.service.wait_for(lambda: site.service.num_running == 1 and site.service.steps_allowed == 0)
    tab.wait_for("document.querySelector('.answer').textContent !== ''")
    assert site.service.stats().blocks["used"] == 2
    if how == "button":
        tab.one("#stop").click()
    elif how == "key":
        tab.page.keyboard.press("Escape")
    else:
        tab.one("#new").click()
    site.service.wait_for(site.service.is_idle)
    assert site.service.stats().blocks["used"] == 0
    assert site.outcomes()["aborted"] == 1
    tab.wait_for_end()
    if how != "new":
        assert tab.one(".note").text_content() == "stopped"
        assert tab.answer() != ""  # what there is stays
        assert tab.problem() == ""
    site.service.release()
    tab.send("again")
    assert tab.answer() == text_of(site)


def test_nothing_is_sent_before_the_page_is_ready(site: Site, tab: Tab) -> None:
    held: list[Any] = []
    tab.page.route("**/page/chat.js", lambda route: held.append(route))
    tab.page.reload(wait_until="commit")
    tab.one("#text").fill("the river")
    assert tab.one("#send").is_disabled()
    tab.one("#max-tokens").press("Enter")  # would send the form, and so load the page anew
    assert len(held) == 1
    held.pop().continue_()
    tab.page.wait_for_selector("#send:enabled")
    assert tab.one("#text").input_value() == "the river"
    tab.one("#send").click()
    assert tab.answer() != ""
    assert [len(held), len(site.service.seen)] == [0, 1]


@pytest.mark.long  # Stop does the same above, and other clients that leave in test_leaving
def test_a_closed_tab_gives_the_blocks_back(site: Site, tab: Tab) -> None:
    site.service.hold(2)
    tab.send("the river")
    site.service.wait_for(lambda: site.service.num_running == 1)
    tab.page.close()
    site.service.wait_for(site.service.is_idle)
    assert site.outcomes()["aborted"] == 1


@pytest.mark.parametrize("template", ["{% for m in messages %}{{ m.content }}{% endfor %}", further(None)])
def test_markup_of_a_model_is_text(start: Any, open_tab: Any, tmp_path: Any, template: str | None) -> None:
    tokenizer = make_tokenizer(tmp_path, template=template)
    site = start(tokenizer=tokenizer, window=512)
    site.service.sentence = tokenizer(MARKUP, add_special_tokens=False)["input_ids"]
    tab = open_tab(site)
    tab.set("#max-tokens", str(2 * len(site.service.sentence)))
    tab.send(MARKUP)
    assert MARKUP in tab.answer()
    assert tab.one(".asked").text_content() == MARKUP
    assert tab.page.locator(".turn img, .turn script, .turn b").count() == 0
    assert tab.page.evaluate("window.ran") is None
    assert not [url for url in tab.asked if url.endswith("/x")]


def test_the_model_is_chosen(start: Any, open_tab: Callable[..., Tab]) -> None:
    site = start(adapters=("pirate",))
    tab = open_tab(site)
    tab.page.wait_for_selector("#model:enabled")
    tab.one("#model").select_option("pirate")
    tab.send("the")
    tab.answer()
    assert site.service.seen[0].adapter == "pirate"
    tab.one("#new").click()
    tab.one("#model").select_option("fake")
    tab.send("the")
    tab.answer()
    assert site.service.seen[1].adapter is None


def test_keys_of_the_keyboard(site: Site, tab: Tab) -> None:
    tab.page.wait_for_selector("#send:enabled")
    tab.one("#text").press("a")
    tab.one("#text").press("Shift+Enter")
    tab.one("#text").press("b")
    # The Enter that ends the choice of a character is not one that sends.
    tab.page.evaluate(
        "document.getElementById('text').dispatchEvent(new KeyboardEvent('keydown', "
        "{key: 'Enter', isComposing: true, bubbles: true, cancelable: true}))"
    )
    assert tab.one("#text").input_value() == "a\nb"
    tab.one("#text").press("Enter")
    tab.answer()
    assert len(site.service.seen) == 1
    assert tab.one(".asked").text_content() == "a\nb"
    assert tab.page.evaluate("document.activeElement.id") == "text"  # for the next question
    for text in ("", "  \n"):
        tab.one("#text").fill(text)
        tab.one("#text").press("Enter")
    tab.set("#max-tokens", "1.5")
    tab.send("not sent")
    assert tab.page.evaluate("document.activeElement.id") == "max-tokens"
    assert len(site.service.seen) == 1
