"""Text as it grows: all of it is what the tokenizer makes of all tokens, up to a stop string."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from colossalai.inference.sampling._text import Stopped, TextStream
from tests.inference.tiny_tokenizers import byte_fallback, byte_level, metaspace

pytestmark = pytest.mark.unit

KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}

texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.text("ab tહ語😀\ufffd\n ", max_size=40),
    st.text("the quick brown fox,. ", max_size=60),
)


def pushed(stream, token_ids, cuts):
    """Push tokens in pieces that end at `cuts`; return what each push and the end gave."""
    places = sorted({min(cut, len(token_ids)) for cut in cuts} | {len(token_ids)})
    begin, given_ = 0, []
    for end in places:
        given_.append(stream.push(token_ids[begin:end]))
        begin = end
    return [*given_, stream.finish()]


cuts = st.one_of(st.just(range(1000)), st.lists(st.integers(0, 60), max_size=20))


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_streamed", [True, False])
@settings(max_examples=80)
@given(text=texts, cuts=cuts)
@example(text=" a", cuts=range(1000))
@example(text="   a", cuts=range(1000))
@example(text="😀😀😀😀😀😀😀😀a", cuts=range(1000))
def test_pieces_of_a_text_are_the_decoded_tokens(kind, is_streamed, text, cuts):
    check_pieces(kind, is_streamed, text, cuts)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_streamed", [True, False])
@settings(max_examples=300)
@given(text=texts, cuts=cuts)
def test_pieces_of_any_of_many_texts_are_the_decoded_tokens(kind, is_streamed, text, cuts):
    check_pieces(kind, is_streamed, text, cuts)


def check_pieces(kind, is_streamed, text, cuts):
    tokenizer = KINDS[kind]()
    if kind == "byte_fallback":
        text = text.replace("\ufffd", "")
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(tokenizer, is_streamed=is_streamed)
    pieces = pushed(stream, token_ids, cuts)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True)
    assert stream.text == "".join(pieces)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@pytest.mark.parametrize("skips", [True, False])
@settings(max_examples=80)
@given(data=st.data(), cuts=cuts)
def test_any_tokens_give_what_they_decode_to(kind, skips, data, cuts):
    """Also bytes that are no text, special tokens, and characters that are cut at the end."""
    check_tokens(kind, skips, data, cuts)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@pytest.mark.parametrize("skips", [True, False])
@settings(max_examples=300)
@given(data=st.data(), cuts=cuts)
def test_any_of_many_tokens_give_what_they_decode_to(kind, skips, data, cuts):
    check_tokens(kind, skips, data, cuts)


def check_tokens(kind, skips, data, cuts):
    tokenizer = KINDS[kind]()
    token_ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=60))
    stream = TextStream(tokenizer, skip_special_tokens=skips)
    assert "".join(pushed(stream, token_ids, cuts)) == tokenizer.decode(token_ids, skip_special_tokens=skips)


@settings(max_examples=80)
@given(data=st.data(), cuts=cuts)
def test_bytes_that_are_no_text_change_no_other_text(data, cuts):
    """With byte fallback: the same text in any pieces, as decoded where each run of bytes is text."""
    check_bytes(data, cuts)


@pytest.mark.long
@settings(max_examples=300)
@given(data=st.data(), cuts=cuts)
def test_many_bytes_that_are_no_text_change_no_other_text(data, cuts):
    check_bytes(data, cuts)


def check_bytes(data, cuts):
    tokenizer = byte_fallback()
    token_ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=60))
    plain = "".join(pushed(TextStream(tokenizer), token_ids, range(1000)))
    assert "".join(pushed(TextStream(tokenizer), token_ids, cuts)) == plain
    assert TextStream(tokenizer, is_streamed=False).push(token_ids) == ""
    lazily = TextStream(tokenizer, is_streamed=False)
    lazily.push(token_ids)
    assert lazily.finish() == plain
    expected = tokenizer.decode(token_ids, skip_special_tokens=True)
    if "\ufffd" not in expected:
        assert plain == expected
    kept = re.sub("[\ufffd\x00-\x7f]+", "", expected)
    assert not kept or set(kept) <= set(plain)


def test_a_character_is_given_as_soon_as_it_is_whole():
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = KINDS[kind]()
        stream = TextStream(tokenizer)
        token_ids = tokenizer.encode("x😀😀é", add_special_tokens=False)
        given_ = [stream.push([token]) for token in token_ids]
        assert [piece for piece in given_ if piece] == ["x", "😀", "😀", "é"], kind
        assert stream.finish() == ""


def test_a_character_that_is_cut_spoils_none_before_it():
    tokenizer = byte_fallback()
    token_ids = tokenizer.encode("ไทย", add_special_tokens=False)
    stream = TextStream(tokenizer)
    assert (
        "".join([*map(stream.push, ([token] for token in token_ids[:-1])), stream.finish()])
        == "ไท\ufffd\ufffd"
    )
    assert tokenizer.decode(token_ids[:-1]).count("\ufffd") > 2  # what the whole run becomes


class Counted:
    """A tokenizer that notes how many tokens it is asked to decode at once."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.all_special_ids = tokenizer.all_special_ids
        self.most = 0
        self.total = 0

    def decode(self, token_ids, **options):
        self.most = max(self.most, len(token_ids))
        self.total += len(token_ids)
        return self.tokenizer.decode(token_ids, **options)


@pytest.mark.parametrize("text", ["the dog jumps ", "😀語", "\x00\x01", " "], ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_late_in_an_answer_costs_what_an_early_one_costs(kind, text):
    tokenizer = KINDS[kind]()
    for token_ids in (
        tokenizer.encode(50 * text, add_special_tokens=False),
        [tokenizer.convert_tokens_to_ids("<s>")] * 300,
        [tokenizer.encode("ÿ", add_special_tokens=False)[-1]] * 300,
    ):
        counted = Counted(tokenizer)
        stream = TextStream(counted)
        for token in token_ids:
            stream.push([token])
        assert counted.most <= 20
        assert counted.total <= 25 * len(token_ids)


def test_text_that_nobody_waits_for_is_decoded_once():
    counted = Counted(byte_level())
    token_ids = byte_level().encode("the quick brown fox " * 9)
    stream = TextStream(counted, is_streamed=False)
    assert [stream.push([token]) for token in token_ids] == [""] * len(token_ids)
    assert counted.total == 0
    assert stream.finish() == "the quick brown fox " * 9
    assert counted.total == len(token_ids)


stopped_texts = {
    "text": st.one_of(st.text("ab ", max_size=40), st.text("ab 語é", max_size=20)),
    "stop": st.lists(st.text("ab 語", min_size=1, max_size=5), max_size=3),
    "cuts": cuts,
}


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_streamed", [True, False])
@settings(max_examples=80)
@given(**stopped_texts)
@example(text="aab", stop=["ab"], cuts=range(1000))
@example(text="aabaabaaab", stop=["aabaaaba", "b b"], cuts=range(1000))
def test_text_ends_before_the_first_stop_string(kind, is_streamed, text, stop, cuts):
    check_end(kind, is_streamed, text, stop, cuts)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_streamed", [True, False])
@settings(max_examples=300)
@given(**stopped_texts)
def test_any_of_many_texts_ends_before_the_first_stop_string(kind, is_streamed, text, stop, cuts):
    check_end(kind, is_streamed, text, stop, cuts)


def check_end(kind, is_streamed, text, stop, cuts):
    tokenizer = KINDS[kind]()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(tokenizer, stop=stop, is_streamed=is_streamed)
    pieces = pushed(stream, token_ids, cuts)
    # The first token with which a stop string is in the text, and of those in it the first.
    expected, stopped = tokenizer.decode(token_ids, skip_special_tokens=True), None
    for count in range(1, len(token_ids) + 1):
        so_far = tokenizer.decode(token_ids[:count], skip_special_tokens=True).rstrip("\ufffd")
        places = [(so_far.find(one), order) for order, one in enumerate(stop) if one in so_far]
        if places:
            place, order = min(places)
            expected, stopped = so_far[:place], Stopped(text=stop[order], num_tokens=count)
            break
    assert "".join(pieces) == expected
    assert stream.stopped == stopped
    assert stream.text == expected


def test_what_may_become_a_stop_string_is_kept_back():
    tokenizer = byte_level()
    stream = TextStream(tokenizer, stop=["END."])
    encode = tokenizer.encode
    assert stream.push(encode("a EN")) == "a "
    assert stream.push(encode("E")) == "EN"
    assert stream.push(encode("ND")) == ""
    assert stream.push([*encode("."), *encode("after")]) == ""
    assert stream.stopped == Stopped(text="END.", num_tokens=len(encode("a EN")) + len(encode("E")) + 3)
    assert stream.push(encode("more")) == ""
    assert stream.finish() == ""
    unfinished = TextStream(tokenizer, stop=["END."])
    assert unfinished.push(encode("END")) == ""
    assert unfinished.finish() == "END"
    assert unfinished.text == "END"


def test_tokens_without_text_cost_nothing_and_take_no_space_away():
    tokenizer = metaspace()
    space, silent = tokenizer.convert_tokens_to_ids(["▁", "<reserved>"])
    token_ids = [*[space] * 12, *[silent] * 200, *tokenizer.encode("a b", add_special_tokens=False)]
    counted = Counted(tokenizer)
    stream = TextStream(counted)
    assert "".join([*(stream.push([token]) for token in token_ids), stream.finish()]) == 12 * " " + "a b"
    assert counted.most <= 20
