"""Packing: nothing is lost, nothing sees another text, and losses are those of the texts alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from colossalai.chat.data import EncodedText, collate, collate_packed, pack, packed_attention_mask

pytestmark = pytest.mark.unit

VOCAB = 50


def texts_of(lengths, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        EncodedText(
            torch.randint(VOCAB, (length,), generator=generator).tolist(),
            (torch.rand(length, generator=generator) < 0.6).tolist(),
        )
        for length in lengths
    ]


def first_fit(lengths, room):
    """Put lengths, longest first, into the first bin with room: as it is defined."""
    bins = []
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        for members in bins:
            if sum(lengths[member] for member in members) + lengths[number] <= room:
                members.append(number)
                break
        else:
            bins.append([number])
    return bins


@settings(max_examples=100)
@given(lengths=st.lists(st.integers(1, 12), max_size=30), room=st.integers(12, 20))
def test_every_text_is_in_one_sequence_whole(lengths, room):
    texts = texts_of(lengths)
    packed = pack(texts, room)
    assert [list(row.members) for row in packed] == first_fit(lengths, room)
    assert sorted(member for row in packed for member in row.members) == list(range(len(texts)))
    for row in packed:
        assert len(row) == len(row.loss_mask) == len(row.position_ids) == len(row.segment_ids) <= room
        begin = 0
        for segment, member in enumerate(row.members):
            text, part = texts[member], slice(begin, begin + lengths[member])
            begin = part.stop
            assert row.input_ids[part] == text.input_ids
            assert row.loss_mask[part] == [False, *text.loss_mask[1:]]
            assert row.position_ids[part] == list(range(len(text)))
            assert row.segment_ids[part] == [segment] * len(text)
    assert pack(texts, room) == packed


def test_a_text_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="text 1 has 6 tokens, more than max_length=5"):
        pack(texts_of([3, 6]), 5)


@settings(max_examples=60)
@given(
    segments=st.lists(
        st.lists(st.integers(-1, 3), min_size=6, max_size=6).map(sorted), min_size=1, max_size=3
    )
)
def test_a_token_sees_what_is_before_it_in_its_text(segments):
    mask = packed_attention_mask(torch.tensor(segments))
    assert (mask.shape, mask.dtype) == ((len(segments), 1, 6, 6), torch.bool)
    for row, seen in zip(segments, mask.squeeze(1).tolist(), strict=True):
        for query in range(6):
            for key in range(6):
                assert seen[query][key] == (row[query] == row[key] and key <= query)
    added = packed_attention_mask(torch.tensor(segments), dtype=torch.float32)
    assert torch.equal(added == 0, mask)
    assert torch.equal(packed_attention_mask(torch.tensor(segments[0])), mask[:1])


def llama(attention):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).double().eval()


def loss_sum(model, batch):
    """Return the sum of the losses of the tokens to learn, each of the logits before it."""
    loss_mask = batch.pop("loss_mask")
    logits = model(**batch, use_cache=False).logits[:, :-1]
    losses = cross_entropy(logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
    return losses[loss_mask[:, 1:]].sum()


# The eager attention of transformers takes its softmax in float32, whatever the dtype of the model.
@pytest.mark.parametrize(("attention", "tolerance"), [("sdpa", 1e-10), ("eager", 1e-5)])
def test_the_loss_of_packed_texts_is_that_of_the_texts_alone(attention, tolerance):
    model = llama(attention)
    texts = texts_of([7, 3, 12, 5, 5, 9, 2])
    packed = pack(texts, 16)
    assert max(len(row.members) for row in packed) > 1
    assert len({len(row) for row in packed}) > 1  # so some are padded

    alone = sum(loss_sum(model, collate([text], pad_token_id=0)) for text in texts)
    alone.backward()
    gradients = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    mask_dtype = torch.float64 if attention == "eager" else None
    together = loss_sum(model, collate_packed(packed, pad_token_id=0, multiple_of=8, mask_dtype=mask_dtype))
    together.backward()
    torch.testing.assert_close(together, alone, rtol=0, atol=tolerance)
    for param, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(param.grad, gradient, rtol=0, atol=tolerance)
