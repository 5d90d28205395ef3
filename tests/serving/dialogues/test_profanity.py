"""Words that are not said: what counts as one, whatever pieces it comes in, on every route."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from colossalai.serving import Server, ServerOptions
from colossalai.serving.command import AnswerCache, ProfanityFilter, ProfanityWords, ServeOptions, serve
from colossalai.serving.command._profanity import REPLACEMENT, ProfanityScan
from tests.serving.dialogues.test_dialogues import events_of, turn
from tests.serving.fake import LIMIT_S, FakeService
from tests.serving.test_errors import refused

pytestmark = pytest.mark.unit

WORDS = ("darn", "bad word", "*hm*", "笨蛋", "café", "ệ", "하", "straße")


@pytest.mark.parametrize(
    ("text", "has_one"),
    [
        ("oh darn", True),
        ("DARN it", True),
        ("darned", False),
        ("undarn", False),
        ("darn", True),
        ("“darn”!", True),
        ("ｄａｒｎ", True),  # noqa: RUF001
        ("da\N{SOFT HYPHEN}r\N{ZERO WIDTH SPACE}n", True),
        ("a bad\n   word.", True),
        ("a bad sword", False),
        ("bad words", False),
        ("ah *HM* oh", True),
        ("ah*hm*oh", True),
        ("你这个笨蛋啊", True),
        ("笨 蛋", False),
        ("笨鸟", False),
        ("darn这", True),
        ("a cafe\N{COMBINING ACUTE ACCENT}", True),
        ("a cafe", False),
        ("a CAFÉ", True),
        ("e\N{COMBINING CIRCUMFLEX ACCENT}\N{COMBINING DOT BELOW}", True),
        ("ê", False),
        ("하", True),
        ("한", False),
        ("\N{HANGUL CHOSEONG HIEUH}\N{HANGUL JUNGSEONG A}", True),
        ("STRASSE", True),
        ("Straße", True),
        ("", False),
        ("dar", False),
        ("bad bad word", True),
    ],
)
def test_what_is_a_word_of_the_list(text: str, has_one: bool) -> None:
    words = ProfanityWords(WORDS)
    assert words.are_in(text) is has_one
    for size in (1, 2, 3):  # whatever pieces it comes in
        scan = ProfanityScan(words)
        said = "".join(scan.push(text[start : start + size]) for start in range(0, len(text), size))
        said += scan.end()
        assert scan.has_found is has_one
        assert said == text if not has_one else text.startswith(said)


def test_nothing_of_a_word_is_said_and_nothing_else_is_held_back() -> None:
    words = ProfanityWords(["darn", "bad word", "笨蛋"])
    scan = ProfanityScan(words)
    assert scan.push("a dance") == "a dance"
    assert scan.push(" d") == " "
    assert scan.push("ar") == ""
    assert scan.push("e bad wo") == "dare "
    assert scan.push("od 笨") == "bad wood "
    assert scan.push("鸟 dar") == "笨鸟 "
    assert scan.push("n") == ""  # "darned" may follow
    assert scan.push("ed") == "darned"
    assert scan.push(" oh darn") == " oh "
    assert scan.push(".") + scan.push(" It") == ""
    assert scan.has_found


def test_any_text_comes_through_whole() -> None:
    draw = random.Random(0)
    letters = "dabrnwo 笨蛋é\N{COMBINING ACUTE ACCENT}\N{ZERO WIDTH SPACE}e\n"
    words, num_found = ProfanityWords(["darn", "bad word", "笨蛋", "é"]), 0
    for _ in range(2000):
        text = "".join(draw.choice(letters) for _ in range(draw.randrange(12)))
        scan, said, place = ProfanityScan(words), "", 0
        while place < len(text):
            size = draw.randrange(1, 4)
            said += scan.push(text[place : place + size])
            place += size
        said += scan.end()
        num_found += scan.has_found
        assert scan.has_found == words.are_in(text)
        assert text.startswith(said)
        assert scan.has_found or said == text
        assert not words.are_in(said)
    assert num_found > 200


def test_the_file(tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_bytes("\ufeffdarn\r\n\r\n  bad word \n".encode())
    words = ProfanityWords.of_file(str(file))
    assert words.are_in("darn")
    assert words.are_in("bad word")
    assert not words.are_in("a word")
    file.write_text('["darn", "笨蛋"]', encoding="utf-8")
    assert ProfanityWords.of_file(str(file)).are_in("笨蛋")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"", "words.txt is empty: write a word or phrase on each line"),
        (b"\n \n", "is empty"),
        (b"[]", "is empty"),
        (b"\xff\xfe", "in UTF-8"),
        (b'["a", 1]', "an item that is not a text"),
        (b'["a"', "a JSON list"),
    ],
)
def test_a_file_that_is_none_is_told_before_anything_starts(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    file = tmp_path / "words.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=said):
        serve(ServeOptions(model="there/is/none", profanity_file=str(file)))


@pytest.fixture
def start(tokenizer: Any) -> Iterator[Callable[..., tuple[FakeService, httpx.Client]]]:
    """Return a function that serves an engine which does not say some words."""
    with ExitStack() as ends:

        def begin(*words: str, is_cached: bool = False) -> tuple[FakeService, httpx.Client]:
            service = FakeService(tokenizer, window=128)
            ends.callback(service.stop)
            front: Any = AnswerCache(service, num_requests=8) if is_cached else service
            server = Server(ProfanityFilter(front, ProfanityWords(words)), ServerOptions(port=0))
            server.start()
            ends.callback(server.stop, 0.0)
            client = httpx.Client(base_url=server.url, timeout=LIMIT_S, trust_env=False)
            ends.callback(client.close)
            ends.callback(service.release)
            return service, client

        yield begin


def test_every_route_says_it_otherwise(start: Any) -> None:
    service, client = start("Meets")
    asked = {"prompt": "the", "max_tokens": 60, "temperature": 0}
    plain = client.post("/v1/completions", json={**asked, "max_tokens": 2}).json()["choices"][0]
    assert plain["finish_reason"] == "length"
    (choice,) = client.post("/v1/completions", json=asked).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (REPLACEMENT, "content_filter")
    chat = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 60}
    (choice,) = client.post("/v1/chat/completions", json=chat).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (REPLACEMENT, "content_filter")
    assert client.post("/generation", json=asked).json() == {"text": REPLACEMENT}
    answer = client.post("/generate", json={"history": [turn("the")], "max_new_tokens": 60})
    assert answer.json() == {"response": REPLACEMENT}
    streamed = client.post("/generate/stream", json={"history": [turn("the")], "max_new_tokens": 60})
    pieces = [data for name, data in events_of(streamed.text) if name == "generate"]
    before, gap, replaced = "".join(pieces).partition("\n\n")
    assert gap or not before
    assert replaced == REPLACEMENT
    assert "meets" not in before
    service.wait_for(lambda: service.is_idle())


def test_an_engine_stops_at_the_word(start: Any) -> None:
    service, client = start("goes")
    service.hold(60)  # more than once through its sentence, less than the whole answer
    answer = client.post("/generate", json={"history": [turn("all")], "max_new_tokens": 100})
    assert answer.json() == {"response": REPLACEMENT}
    service.wait_for(lambda: len(service.aborted) == 1)
    service.wait_for(service.is_idle)


def test_a_question_with_a_word_is_not_asked(start: Any) -> None:
    service, client = start("river")
    answer = client.post("/generate", json={"history": [turn("the river, please")], "max_new_tokens": 3})
    assert answer.json() == {"response": REPLACEMENT}
    assert service.seen == []


def test_log_probabilities_would_name_it(start: Any) -> None:
    _, client = start("river")
    body = {"prompt": "all", "max_tokens": 2, "logprobs": 1}
    status, error = refused(client.post("/v1/completions", json=body))
    assert status == 400
    assert "leave them out" in error["message"]


def test_kept_answers_are_filtered_as_well(start: Any) -> None:
    service, client = start("meets", is_cached=True)
    body = {"prompt": "all", "max_tokens": 80, "temperature": 0}
    for _ in range(2):
        assert client.post("/generation", json=body).json() == {"text": REPLACEMENT}
    assert ProfanityFilter(service, ProfanityWords(["a"])).info.name == "fake"
    with pytest.raises(ValueError, match="has no tokenizer: leave the file out"):
        ProfanityFilter(FakeServiceWithoutTokenizer(), ProfanityWords(["a"]))  # type: ignore[arg-type]


class FakeServiceWithoutTokenizer:
    tokenizer = None
