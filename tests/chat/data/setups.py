"""Tiny tokenizers with chat templates of the kinds that models have, and rows of every format."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BEGIN = "{% for m in messages %}"
ASK = "{% if add_generation_prompt %}<|assistant|>{% endif %}"

CHATML = BEGIN + "<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}" + ASK
"""Each turn with its role before it, and the end-of-sequence token and a line break behind."""
WITH_BOS = "{{ bos_token }}" + CHATML
WITHOUT_END = BEGIN + "<|{{ m.role }}|>{{ m.content }}{% endfor %}" + ASK
BRACKETS = (
    BEGIN
    + "{% if m.role == 'assistant' %} {{ m.content }}</s>"
    + "{% elif m.role == 'user' %}[INST] {% if loop.index0 == 1 %}{{ messages[0].content }}\n{% endif %}"
    + "{{ m.content }} [/INST]{% elif messages|length == 1 %}{{ raise_exception('no question') }}{% endif %}"
    + "{% endfor %}"
)
"""The answer follows its question directly; the system's words are a part of the first question."""
WITHOUT_PROMPT = BEGIN + "<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}"
LATE_THOUGHTS = (
    BEGIN
    + "<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}(hm) {% endif %}{{ m.content }}</s>\n"
    + "{% endfor %}"
    + ASK
)
"""Only the last answer has its thoughts before it."""

SPECIAL = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]


def tokenizer_of(template=None, *, adds_bos=True, eos="</s>"):
    """Return a byte-level tokenizer that puts `<s>` before each text."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(["the answer is an apple. Response: the question is"] * 4, trainer)
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    bos = {"bos_token": "<s>"} if adds_bos else {}
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos, **bos)
    made.chat_template = template
    return made


def chat(*turns):
    """Return messages that alternate between user and assistant, after those of "system: "."""
    messages = []
    for turn in turns:
        is_system = turn.startswith("system: ")
        num_said = sum(message["role"] != "system" for message in messages)
        role = "system" if is_system else ("user", "assistant")[num_said % 2]
        messages.append({"role": role, "content": turn.removeprefix("system: ")})
    return messages


def write_lines(file, rows, *, end="\n", mark=""):
    """Write rows as JSON lines, characters as they are."""
    text = "".join(json.dumps(row, ensure_ascii=False) + end for row in rows)
    file.write_bytes((mark + text).encode())
    return file


HUMAN = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: 3+4?\n\nAssistant:"

# name: (a row, its stage, its format)
ROWS = {
    "alpaca": ({"instruction": "add", "input": "3 4", "output": "7"}, "sft", "alpaca"),
    "alpaca without input": ({"instruction": "add", "output": "7"}, "sft", "alpaca"),
    "completion": ({"prompt": "3+4=", "completion": "7"}, "sft", "prompt_completion"),
    "messages": ({"messages": chat("3+4?", "7")}, "sft", "messages"),
    "pair": ({"prompt": "3+4=", "chosen": "7", "rejected": "8"}, "preference", "prompt_pair"),
    "dialogues": (
        {"chosen": HUMAN + " 7", "rejected": HUMAN + " 8"},
        "preference",
        "dialogue_pair",
    ),
    "chats": (
        {"chosen": chat("3+4?", "7"), "rejected": chat("3+4?", "8")},
        "preference",
        "message_pair",
    ),
    "chats with their prompt": (
        {"prompt": "3+4?", "chosen": chat("3+4?", "7"), "rejected": chat("3+4?", "8")},
        "preference",
        "message_pair",
    ),
    "answers to a prompt": (
        {
            "prompt": chat("3+4?"),
            "chosen": [{"role": "assistant", "content": "7"}],
            "rejected": [{"role": "assistant", "content": "8"}],
        },
        "preference",
        "message_pair",
    ),
    "instruction": ({"instruction": "add 3 and 4", "answer": "7"}, "prompts", "alpaca"),
    "prompt": ({"prompt": "3+4=", "answer": 7}, "prompts", "prompt"),
}
