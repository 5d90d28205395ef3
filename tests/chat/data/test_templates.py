"""Texts of dialogues: what a template writes, and which part of it is learned."""

import pytest

from colossalai.chat.data import ChatTemplateError, encode_preference, encode_prompt, encode_sft
from tests.chat.data.setups import (
    BRACKETS,
    CHATML,
    HUMAN,
    LATE_THOUGHTS,
    WITH_BOS,
    WITHOUT_END,
    WITHOUT_PROMPT,
    chat,
    tokenizer_of,
)

pytestmark = pytest.mark.unit

TASK = "Below is an instruction that describes a task"
REQUEST = "Write a response that appropriately completes the request."
WITH_INPUT = (
    f"{TASK}, paired with an input that provides further context. {REQUEST}\n\n"
    "### Instruction:\nadd\n\n### Input:\n3 4\n\n### Response:"
)
NO_INPUT = f"{TASK}. {REQUEST}\n\n### Instruction:\nadd\n\n### Response:"


def text_and_learned(encoded, tokenizer):
    """Return the text of the tokens, and that of each run of tokens that is learned."""
    runs, begins = [], True
    for token, is_learned in zip(encoded.input_ids, encoded.loss_mask, strict=True):
        if is_learned and begins:
            runs.append([])
        if is_learned:
            runs[-1].append(token)
        begins = not is_learned
    return tokenizer.decode(encoded.input_ids), [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    ("context", "prompt"),
    [({"input": "3 4"}, WITH_INPUT), ({"input": ""}, NO_INPUT), ({"input": None}, NO_INPUT), ({}, NO_INPUT)],
    ids=["input", "empty", "None", "missing"],
)
def test_instructions_have_the_alpaca_template(context, prompt):
    tokenizer = tokenizer_of()
    row = {"instruction": "add", "output": "{7}"} | context
    assert text_and_learned(encode_sft(row, tokenizer, 500), tokenizer) == (
        f"<s>{prompt}{{7}}</s>",
        ["{7}</s>"],
    )
    assert tokenizer.decode(encode_prompt(row, tokenizer, 500)) == f"<s>{prompt}"


def test_dialogues_are_parted_at_the_last_assistant_that_both_have():
    tokenizer = tokenizer_of()
    row = {"chosen": HUMAN + " 7, is it", "rejected": HUMAN + " 7. No"}
    chosen, rejected = encode_preference(row, tokenizer, 500)
    assert text_and_learned(chosen, tokenizer) == (f"<s>{HUMAN} 7, is it</s>", [" 7, is it</s>"])
    assert text_and_learned(rejected, tokenizer) == (f"<s>{HUMAN} 7. No</s>", [" 7. No</s>"])


TALK = chat("system: be brief", "q1", "a1", "q2", "a2")
# From a name to a template, the text that it writes of TALK, and what is learned of it.
WRITTEN = {
    "chatml": (
        CHATML,
        "<|system|>be brief</s>\n<|user|>q1</s>\n<|assistant|>a1</s>\n<|user|>q2</s>\n<|assistant|>a2</s>",
        ["a1</s>\n", "a2</s>"],
    ),
    "with bos": (
        WITH_BOS,
        "<s><|system|>be brief</s>\n<|user|>q1</s>\n<|assistant|>a1</s>\n<|user|>q2</s>\n<|assistant|>a2</s>",
        ["a1</s>\n", "a2</s>"],
    ),
    "without end": (
        WITHOUT_END,
        "<|system|>be brief<|user|>q1<|assistant|>a1<|user|>q2<|assistant|>a2</s>",
        ["a1", "a2</s>"],
    ),
    "brackets": (
        BRACKETS,
        "[INST] be brief\nq1 [/INST] a1</s>[INST] q2 [/INST] a2</s>",
        [" a1</s>", " a2</s>"],
    ),
}


@pytest.mark.parametrize(("template", "text", "learned"), WRITTEN.values(), ids=list(WRITTEN))
@pytest.mark.parametrize("rest", [[], [{"role": "user", "content": "bye"}]], ids=["answered", "bye"])
def test_all_turns_of_the_assistant_are_learned(template, text, learned, rest):
    tokenizer = tokenizer_of(template)
    encoded = encode_sft({"messages": TALK + rest}, tokenizer, 500)
    assert text_and_learned(encoded, tokenizer) == (text, learned)


@pytest.mark.parametrize("template", [CHATML, WITH_BOS, WITHOUT_END, BRACKETS], ids=list(WRITTEN))
def test_a_prompt_is_what_an_answer_is_learned_after(template):
    tokenizer = tokenizer_of(template)
    row = {"messages": TALK}
    prompt = encode_prompt(row, tokenizer, 500)
    learned = encode_sft(row, tokenizer, 500)
    assert learned.input_ids[: len(prompt)] == prompt
    assert not learned.loss_mask[len(prompt) - 1]
    assert all(learned.loss_mask[len(prompt) :])
    whole = tokenizer.apply_chat_template(TALK[:-1], add_generation_prompt=True, return_dict=False)
    assert prompt == whole


def test_pairs_of_messages_have_the_same_prompt():
    tokenizer = tokenizer_of(CHATML)
    row = {"chosen": TALK, "rejected": [*TALK[:-1], {"role": "assistant", "content": "no"}]}
    chosen, rejected = encode_preference(row, tokenizer, 500)
    assert text_and_learned(chosen, tokenizer)[1] == ["a2</s>"]
    assert text_and_learned(rejected, tokenizer)[1] == ["no</s>"]
    first = chosen.loss_mask.index(True)
    assert first == rejected.loss_mask.index(True)
    assert chosen.input_ids[:first] == rejected.input_ids[:first]


def test_conversations_that_part_early_have_all_of_what_follows_learned():
    tokenizer = tokenizer_of(CHATML)
    row = {"chosen": chat("q1", "a1", "q2", "a2"), "rejected": chat("q1", "a1", "other", "no")}
    chosen, rejected = encode_preference(row, tokenizer, 500)
    assert text_and_learned(chosen, tokenizer)[1] == ["a1</s>\n", "a2</s>"]
    assert text_and_learned(rejected, tokenizer)[1] == ["a1</s>\n", "no</s>"]


@pytest.mark.parametrize(
    ("prompt", "begin"),
    [("q1", 0), ("q1", 1), (chat("q1"), 0), (chat("q1"), 1)],
    ids=["text, whole", "text, answers", "messages, whole", "messages, answers"],
)
def test_a_prompt_beside_messages_is_written_once(prompt, begin):
    tokenizer = tokenizer_of(CHATML)
    row = {"prompt": prompt, "chosen": chat("q1", "yes")[begin:], "rejected": chat("q1", "no")[begin:]}
    chosen, rejected = encode_preference(row, tokenizer, 500)
    assert tokenizer.decode(chosen.input_ids) == "<|user|>q1</s>\n<|assistant|>yes</s>"
    assert tokenizer.decode(rejected.input_ids) == "<|user|>q1</s>\n<|assistant|>no</s>"


def test_an_answered_question_is_asked_again():
    tokenizer = tokenizer_of(CHATML)
    assert encode_prompt({"messages": TALK}, tokenizer, 500) == encode_prompt(
        {"messages": TALK[:-1]}, tokenizer, 500
    )


TWO_TURNS = {"messages": chat("q1", "a1", "q2", "a2")}
# From a name to a template, a row that it does not write, and what is said of it.
REFUSED = {
    "thoughts": (LATE_THOUGHTS, TWO_TURNS, "the row: .* writes the text before message 3 otherwise"),
    "no prompt": (WITHOUT_PROMPT, TWO_TURNS, "the row: .* has no generation prompt"),
    "raises": (BRACKETS, {"messages": [TALK[0], TALK[2]]}, "does not take these messages: no question"),
    "none": (None, TWO_TURNS, "messages need a tokenizer with a chat template"),
}


@pytest.mark.parametrize(("template", "row", "message"), REFUSED.values(), ids=list(REFUSED))
def test_templates_that_answers_cannot_be_found_in_are_refused(template, row, message):
    with pytest.raises(ChatTemplateError, match=message):
        encode_sft(row, tokenizer_of(template), 500)


def test_one_answer_with_thoughts_is_learned_whole():
    tokenizer = tokenizer_of(LATE_THOUGHTS)
    encoded = encode_sft({"messages": chat("q1", "a1")}, tokenizer, 500)
    assert text_and_learned(encoded, tokenizer)[1] == ["(hm) a1</s>"]


def test_a_prompt_needs_a_generation_prompt_too():
    with pytest.raises(ChatTemplateError, match="has no generation prompt"):
        encode_prompt({"messages": chat("q1")}, tokenizer_of(WITHOUT_PROMPT), 500)
