"""Prompt lookup: the index finds what a scan of the whole text finds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossalai.inference import EngineOptions, Request
from colossalai.inference.scheduling import RunningSequence
from colossalai.inference.speculation import NgramDrafts, SpeculationWay

pytestmark = pytest.mark.unit


def sequence_of(tokens):
    request = Request(request_id="r", prompt_token_ids=tuple(tokens))
    return RunningSequence(request, index=0, order=(0, 0, 0), root=b"")


def scanned(tokens, longest, num_tokens):
    """Return the draft by looking at every place of the text, and how long the match is."""
    for length in range(min(longest, len(tokens) - 1), 0, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                grown = list(tokens)
                for place in range(end, end + num_tokens):
                    grown.append(grown[place])
                return grown[len(tokens) :], length
    return None, 0


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_the_index_finds_what_a_scan_finds(pieces, longest, num_tokens):
    maker, sequence = NgramDrafts(longest), sequence_of(pieces[0])
    for piece in [[], *pieces[1:]]:  # the text grows by one or by several tokens
        sequence.tokens += piece
        draft, length = scanned(sequence.tokens, longest, num_tokens)
        assert maker.reach(sequence, num_tokens) == (num_tokens if length else 0, length)
        found = maker.drafts({sequence: num_tokens})
        assert found.get(sequence) == draft
        assert maker.lag(sequence) == 0


def test_a_token_costs_as_much_behind_a_long_text_as_behind_a_short_one():
    """What is looked up of a text is its new tokens, and its last ones."""

    class Counting(list):
        num_read = 0

        def __getitem__(self, key):
            found = super().__getitem__(key)
            Counting.num_read += len(found) if isinstance(key, slice) else 1
            return found

    counts = []
    for length in (100, 10_000):
        maker, sequence = NgramDrafts(3), sequence_of([0])
        sequence.tokens = Counting(range(length))
        maker.reach(sequence, 4)
        Counting.num_read = 0
        sequence.tokens.append(5)
        assert maker.drafts({sequence: 4}) == {sequence: [6, 7, 8, 9]}
        counts.append(Counting.num_read)
    assert counts[0] == counts[1] < 30


def test_an_index_goes_with_its_sequence():
    maker, sequence = NgramDrafts(), sequence_of([1, 2, 1])
    assert maker.drafts({sequence: 1}) == {sequence: [2]}
    maker.forget(sequence)
    maker.forget(sequence)
    assert not maker._indices


@pytest.mark.parametrize(
    ("text", "way"),
    [
        ("ngram:4", SpeculationWay("ngram", 4, 3)),
        ("ngram:2:5", SpeculationWay("ngram", 2, 5)),
        ("path/to/small:3", SpeculationWay("path/to/small", 3)),
        ("./ngram:3", SpeculationWay("./ngram", 3)),
        ("a:b/c:1", SpeculationWay("a:b/c", 1)),
    ],
)
def test_ways(text, way):
    assert SpeculationWay.of(text) == way
    assert EngineOptions(speculate=text).speculate == text


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "ngram",
            "ngram:",
            "ngram:0",
            "ngram:-1",
            "ngram:4:0",
            "ngram:4:2:1",
            "ngram:four",
            "ngram:1.5",
        ),
        *("folder", "folder:", "folder:0", ":4", "folder:²"),
    ],
)
def test_other_forms_are_refused(text):
    with pytest.raises(ValueError, match=r"speculate=.*must be 'ngram:K', 'ngram:K:N' or 'FOLDER:K'"):
        EngineOptions(speculate=text)
