"""Batches: padding that no mask has, and loaders whose order, parts and position are the runtime's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colossalai.chat.data import (
    EncodedPair,
    EncodedText,
    chat_data,
    collate,
    collate_packed,
    collate_pairs,
    encode_all,
    make_chat_dataloader,
    make_toy_data,
    pack,
    places_in_batches,
)
from tests.chat.data.setups import tokenizer_of

pytestmark = pytest.mark.unit

SHORT = EncodedText([5, 6, 7], [False, True, True])
LONG = EncodedText([8, 9, 1, 2, 3], [False, False, False, False, True])


def test_texts_are_padded_on_the_right():
    batch = collate([SHORT, LONG], pad_token_id=4)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 6, 7, 4, 4], [8, 9, 1, 2, 3]],
        "attention_mask": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
        "loss_mask": [[False, True, True, False, False], [False, False, False, False, True]],
    }
    dtypes = {"input_ids": torch.int64, "attention_mask": torch.int64, "loss_mask": torch.bool}
    assert {name: tensor.dtype for name, tensor in batch.items()} == dtypes


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    rows=st.integers(1, 8),
    tokens=st.none() | st.integers(1, 100),
    multiple_of=st.integers(1, 3),
    at_least=st.integers(1, 40),
)
def test_batches_hold_no_more_than_they_may(lengths, rows, tokens, multiple_of, at_least):
    found = places_in_batches(lengths, rows=rows, tokens=tokens, multiple_of=multiple_of, at_least=at_least)
    assert sorted(place for batch in found for place in batch) == list(range(len(lengths)))
    assert len(found) >= min(at_least, len(lengths))
    for batch in found:
        assert 1 <= len(batch) <= rows
        size = -(-len(batch) // multiple_of) * multiple_of * max(lengths[place] for place in batch)
        assert tokens is None or len(batch) == 1 or size <= tokens
    ordered = [lengths[place] for batch in found for place in batch]
    assert ordered == sorted(lengths)


def test_short_texts_share_a_batch_and_long_ones_do_not():
    assert places_in_batches([3, 20, 4, 19, 5], rows=8, tokens=20) == [[0, 2, 4], [3], [1]]
    assert places_in_batches([3, 20, 4, 19, 5], rows=2) == [[0, 2], [4, 3], [1]]
    assert places_in_batches([3, 4, 5], rows=8, tokens=20, at_least=2) == [[0], [1, 2]]


@pytest.mark.parametrize(("multiple_of", "length"), [(1, 5), (5, 5), (4, 8), (8, 8)])
def test_lengths_are_multiples(multiple_of, length):
    for batch in (
        collate([SHORT, LONG], pad_token_id=4, multiple_of=multiple_of),
        collate_packed(pack([SHORT, LONG], 5), pad_token_id=4, multiple_of=multiple_of),
    ):
        assert batch["input_ids"].shape == batch["loss_mask"].shape == (2, length)


def test_the_texts_of_a_pair_are_neighbours():
    pairs = [EncodedPair(SHORT, LONG)] * 2
    batch = collate_pairs(pairs, pad_token_id=4)
    expected = collate([SHORT, LONG, SHORT, LONG], pad_token_id=4)
    assert all(torch.equal(batch[name], expected[name]) for name in expected)


def test_packed_texts_are_padded_with_a_text_of_its_own():
    batch = collate_packed(pack([SHORT, SHORT, LONG], 6), pad_token_id=4)
    assert batch["input_ids"].tolist() == [[8, 9, 1, 2, 3, 4], [5, 6, 7, 5, 6, 7]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 0, 1, 2]]
    mask = batch["attention_mask"]
    assert mask.shape == (2, 1, 6, 6)
    assert mask[0, 0, 5].tolist() == [False] * 5 + [True]
    assert mask[1, 0, 3].tolist() == [False] * 3 + [True] + [False] * 2
    assert mask.any(-1).all()


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {"pad_token_id": 0}, "at least one row"),
        ([SHORT], {"pad_token_id": None}, "pad_token_id=None is not a token"),
        ([SHORT], {"pad_token_id": -100}, "pad_token_id=-100 is not a token"),
        ([SHORT], {"pad_token_id": 0, "multiple_of": 0}, "multiple_of=0"),
    ],
)
def test_wrong_batches_are_refused(rows, options, message):
    with pytest.raises(ValueError, match=message):
        collate(rows, **options)


def encoded_of(stage, count=10):
    return encode_all(chat_data(make_toy_data("copy", count, 0, stage=stage)), tokenizer_of(), 100)


def loader_of(encoded, **options):
    return make_chat_dataloader(encoded, batch_size=2, pad_token_id=1, shuffle=True, seed=3, **options)


def rows_of(batches):
    return sorted(tuple(row[row != 1].tolist()) for batch in batches for row in batch["input_ids"])


@pytest.mark.parametrize("stage", ["sft", "preference", "prompts"])
def test_replicas_have_parts_of_their_own(stage):
    encoded = encoded_of(stage)
    parts = [list(loader_of(encoded, num_replicas=2, replica=replica)) for replica in (0, 1)]
    assert rows_of(parts[0] + parts[1]) == rows_of(loader_of(encoded))
    assert not set(rows_of(parts[0])) & set(rows_of(parts[1]))
    rows_in_batch = 4 if stage == "preference" else 2
    assert [len(batch["input_ids"]) for batch in parts[0]] == [rows_in_batch] * 2 + [rows_in_batch // 2]


def test_a_loader_goes_on_where_it_was_with_the_same_order():
    encoded = encoded_of("sft")
    loader, again = loader_of(encoded), loader_of(encoded)
    batches = [batch["input_ids"] for batch in loader]
    assert all(torch.equal(a, b["input_ids"]) for a, b in zip(batches, again, strict=True))
    passing = iter(loader_two := loader_of(encoded))
    for _ in range(2):
        next(passing)
    resumed = loader_of(encoded)
    resumed.load_state_dict(loader_two.state_dict())
    rest = [batch["input_ids"] for batch in resumed]
    assert len(rest) == 3
    assert all(torch.equal(a, b) for a, b in zip(batches[2:], rest, strict=True))


def test_texts_are_packed_on_demand_and_pairs_are_not():
    batches = list(loader_of(encoded_of("sft"), pack_length=64))
    assert sum(len(batch["input_ids"]) for batch in batches) < 10
    assert {"position_ids", "attention_mask"} <= batches[0].keys()
    with pytest.raises(ValueError, match=r"take \.pairs"):
        loader_of(encoded_of("preference"), pack_length=64)
