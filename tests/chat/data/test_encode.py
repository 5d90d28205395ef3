"""Tokens and masks: what is learned, what is cut, what is left out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossalai.chat.data import (
    EncodedText,
    chat_data,
    encode_all,
    encode_preference,
    encode_prompt,
    encode_sft,
)
from tests.chat.data.setups import BRACKETS, CHATML, WITH_BOS, chat, tokenizer_of
from tests.inference.tiny_tokenizers import byte_fallback, byte_level, metaspace

pytestmark = pytest.mark.unit

BOS, EOS = 0, 1
SOME_TEXT = st.text(st.sampled_from("ab 七\n"), max_size=8)


def completion(prompt, answer, **more):
    return {"prompt": prompt, "completion": answer} | more


@pytest.mark.parametrize("kind", [byte_level, byte_fallback, tokenizer_of], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("text", ["加三和四，等于？", "größer où", "日本\u2028語"])  # noqa: RUF001
def test_text_survives(kind, text):
    tokenizer = kind()
    encoded = encode_sft(completion(text, text), tokenizer, 500)
    assert tokenizer.decode(encoded.input_ids, skip_special_tokens=True) == text * 2


@pytest.mark.parametrize("kind", [byte_level, byte_fallback, metaspace, tokenizer_of])
@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("the quick", " dog"),
        ("the quick ", "dog"),
        ("the qu", "ick dog"),
        ("a, ", " the"),
        ("", "dog"),
        ("a", ""),
    ],
)
def test_the_prompt_is_encoded_as_when_it_is_asked(kind, prompt, answer):
    tokenizer = kind()
    asked = encode_prompt({"prompt": prompt}, tokenizer, 500) if prompt else tokenizer("")["input_ids"]
    assert asked == tokenizer(prompt)["input_ids"]
    if not asked and not answer:
        return
    encoded = encode_sft(completion(prompt, answer), tokenizer, 500)
    assert encoded.input_ids[: len(asked)] == asked
    assert encoded.loss_mask == [False] * len(asked) + [True] * (len(encoded) - len(asked))
    assert encoded.input_ids[-1] == tokenizer.eos_token_id
    both = tokenizer.decode(encoded.input_ids, skip_special_tokens=True)
    assert both.replace(" ", "") == (prompt + answer).replace(" ", "")


def test_tokens_go_on_from_the_prompt_where_they_can():
    tokenizer = byte_fallback()  # which begins each text with a space
    encoded = encode_sft(completion("日", "本"), tokenizer, 500)
    assert tokenizer.decode(encoded.input_ids, skip_special_tokens=True) == "日本"
    assert encoded.input_ids[:-1] == tokenizer("日本")["input_ids"]


def test_the_first_and_the_last_token_are_not_doubled():
    tokenizer = tokenizer_of()
    encoded = encode_sft(completion("<s>a", "b</s>"), tokenizer, 500)
    assert encoded == encode_sft(completion("a", "b"), tokenizer, 500)
    assert encoded.input_ids.count(BOS) == encoded.input_ids.count(EOS) == 1
    within = encode_sft(completion("a", "b</s>c"), tokenizer, 500)
    assert [within.input_ids.count(EOS), within.input_ids[-1]] == [2, EOS]


def test_a_tokenizer_without_an_end_is_refused():
    tokenizer = tokenizer_of(eos=None)
    with pytest.raises(ValueError, match="the tokenizer has no end-of-sequence token"):
        encode_sft(completion("a", "b"), tokenizer, 500)
    assert encode_prompt({"prompt": "a"}, tokenizer, 500)


def test_rows_without_anything_to_learn_or_to_ask_are_refused_with_their_place():
    tokenizer = tokenizer_of(adds_bos=False)
    data = chat_data([completion("a", "b"), completion("", "")])
    with pytest.raises(ValueError, match=r"row 1 \(the first is 0\): there is no token to learn"):
        encode_all(data, tokenizer, 500)
    data = chat_data([{"prompt": "a"}, {"prompt": ""}])
    with pytest.raises(ValueError, match=r"row 1 \(the first is 0\): the prompt has no tokens"):
        encode_all(data, tokenizer, 500)


def test_rows_of_another_stage_are_refused():
    (row,) = chat_data([completion("a", "b")])
    with pytest.raises(ValueError, match=r"row 0 .* read for stage 'sft', not 'prompts'; .*stage='prompts'"):
        encode_prompt(row, tokenizer_of(), 500)
    with pytest.raises(
        ValueError, match=r"the row: the keys \['prompt', 'completion'\] fit no format of stage"
    ):
        encode_preference(dict(row), tokenizer_of(), 500)


@pytest.mark.parametrize("encode", [encode_sft, encode_prompt, encode_preference])
def test_a_length_without_tokens_is_refused(encode):
    row = {"prompt": "a", "completion": "b", "chosen": "c", "rejected": "d"}
    with pytest.raises(ValueError, match="max_length=0 tokens: give at least 1"):
        encode(row, tokenizer_of(), 0)


@settings(max_examples=150)
@given(prompt=SOME_TEXT, answer=SOME_TEXT, adds_bos=st.booleans(), max_length=st.integers(1, 40))
def test_a_prompt_is_cut_on_the_left_behind_its_first_token(prompt, answer, adds_bos, max_length):
    tokenizer = TOKENIZERS[adds_bos]
    if not adds_bos and not prompt and not answer:
        return
    whole = encode_sft(completion(prompt, answer), tokenizer, 10_000)
    cut = encode_sft(completion(prompt, answer), tokenizer, max_length)
    num_learned, num_cut = sum(whole.loss_mask), max(len(whole) - max_length, 0)
    if adds_bos + num_learned > max_length or (num_cut and max_length == 1):
        assert cut is None
        return
    assert len(cut) == min(max_length, len(whole))
    assert cut.num_cut == num_cut
    assert cut.input_ids == whole.input_ids[:adds_bos] + whole.input_ids[adds_bos + num_cut :]
    assert cut.loss_mask == [False] * (len(cut) - num_learned) + [True] * num_learned


TOKENIZERS = (tokenizer_of(CHATML, adds_bos=False), tokenizer_of(WITH_BOS))


@settings(max_examples=150)
@given(
    turns=st.lists(SOME_TEXT, min_size=2, max_size=8),
    system=st.booleans(),
    has_bos=st.booleans(),
    max_length=st.integers(1, 60),
)
def test_a_conversation_keeps_its_system_turn_and_its_last_answer(turns, system, has_bos, max_length):
    tokenizer = TOKENIZERS[has_bos]
    turns = turns[: len(turns) // 2 * 2]
    row = {"messages": chat(*["system: be brief"] * system, *turns)}
    whole = encode_sft(row, tokenizer, 10_000)
    cut = encode_sft(row, tokenizer, max_length)
    head = tokenizer("<s>" * has_bos + "<|system|>be brief</s>\n" * system, add_special_tokens=False)[
        "input_ids"
    ]
    last = len(whole) - whole.loss_mask[::-1].index(False)
    num_cut = max(len(whole) - max_length, 0)
    if num_cut and (len(head) + len(whole) - last > max_length or max_length == 1):
        assert cut is None
        return
    assert (len(cut), cut.num_cut) == (min(len(whole), max_length), num_cut)
    assert cut.input_ids == head + whole.input_ids[len(head) + num_cut :]
    kept = whole.loss_mask[: len(head)] + whole.loss_mask[len(head) + num_cut :]
    # Each answer is learned whole or not at all; only the first of what is left may have lost its beginning.
    wrong = [place for place, pair in enumerate(zip(kept, cut.loss_mask, strict=True)) if pair[0] != pair[1]]
    if wrong:
        assert num_cut > 0
        assert whole.loss_mask[len(head) + num_cut - 1]
        assert wrong == list(range(len(head), len(head) + len(wrong)))
        assert not kept[wrong[-1] + 1]
    elif num_cut and whole.loss_mask[len(head) + num_cut - 1]:
        assert not kept[len(head)] or len(head) + num_cut == last
    assert all(cut.loss_mask[len(cut) - (len(whole) - last) :])


def test_a_system_turn_within_the_first_question_stays():
    tokenizer = tokenizer_of(BRACKETS, adds_bos=False)
    row = {"messages": chat("system: be brief", "a long question", "a1")}
    whole = encode_sft(row, tokenizer, 500)
    cut = encode_sft(row, tokenizer, len(whole) - 4)
    text = tokenizer.decode(cut.input_ids)
    assert text.startswith("[INST] be brief")
    assert text.endswith("[/INST] a1</s>")


@settings(max_examples=150)
@given(prompt=SOME_TEXT, chosen=SOME_TEXT, rejected=SOME_TEXT, max_length=st.integers(2, 40))
def test_the_texts_of_a_pair_are_cut_alike(prompt, chosen, rejected, max_length):
    tokenizer = TOKENIZERS[True]
    pair = encode_preference(
        {"prompt": prompt, "chosen": chosen, "rejected": rejected}, tokenizer, max_length
    )
    wholes = [encode_sft(completion(prompt, answer), tokenizer, 10_000) for answer in (chosen, rejected)]
    if max(sum(whole.loss_mask) for whole in wholes) >= max_length:
        assert pair is None
        return
    prompts = [
        [token for token, learned in zip(text.input_ids, text.loss_mask, strict=True) if not learned]
        for text in pair
    ]
    assert prompts[0] == prompts[1]
    num_cut = max(0, *(len(whole) - max_length for whole in wholes))
    for text, whole in zip(pair, wholes, strict=True):
        assert text.num_cut == num_cut
        assert text.input_ids == [BOS, *whole.input_ids[1 + num_cut :]]


def test_a_long_prompt_keeps_its_head_and_its_end():
    tokenizer = tokenizer_of(WITH_BOS)
    row = {"messages": chat("system: be brief", "a very long question")}
    whole = encode_prompt(row, tokenizer, 500)
    cut = encode_prompt(row, tokenizer, len(whole) - 5)
    text = tokenizer.decode(cut)
    assert text.startswith("<s><|system|>be brief</s>\n")
    assert text.endswith("</s>\n<|assistant|>")
    assert len(cut) == len(whole) - 5
    assert encode_prompt(row, tokenizer, 3) is None


def test_all_rows_are_encoded_and_what_does_not_fit_is_counted():
    tokenizer = tokenizer_of()
    data = chat_data(
        [completion("0" * 8, "1"), completion("2", "3" * 12), completion("4", "5"), completion("6" * 10, "7")]
    )
    encoded = encode_all(data, tokenizer, 10)
    assert (len(encoded), encoded.num_left_out, encoded.num_cut, encoded.stage) == (3, 1, 1 + 3, "sft")
    assert [source["completion"] for source in encoded.sources] == ["1", "5", "7"]
    assert list(encoded.texts) == [encode_sft(source, tokenizer, 10) for source in encoded.sources]
    assert encoded[1] == EncodedText(encoded[1].input_ids, [False, False, True, True], 0)
    with pytest.raises(ValueError, match=r"are not pairs: take \.texts"):
        _ = encoded.pairs
    with pytest.raises(ValueError, match="max_length=2: all 4 rows have longer answers"):
        encode_all(data, tokenizer, 2)


def test_pairs_and_prompts_are_encoded_too():
    tokenizer = tokenizer_of()
    row = {"prompt": "0123456789", "chosen": "1", "rejected": "22", "answer": 1}
    encoded = encode_all(chat_data([row, row]), tokenizer, 10)
    assert (encoded.num_cut, encoded.num_left_out) == (2 * 4, 0)
    assert encoded.pairs[0] == encode_preference(row, tokenizer, 10)
    with pytest.raises(ValueError, match=r"are pairs of texts: take \.pairs"):
        _ = encoded.texts
    prompts = encode_all(chat_data([row], "prompts"), tokenizer, 10)
    assert prompts.texts[0].input_ids == encode_prompt(row, tokenizer, 10)
    assert not any(prompts.texts[0].loss_mask)
    assert prompts.sources[0]["answer"] == 1
