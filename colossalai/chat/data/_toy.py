"""Synthetic chat data that small models learn in minutes: sums, copying, sorting, in English and Chinese.

A hash of its own text assigns a question to training or testing, independent of the seed: no data of split
"train" has a question of split "test".
"""

import hashlib
import random
import string
from typing import Any, Literal, get_args

from colossalai.chat.data._formats import ChatStage

ToyKind = Literal["sums", "copy", "sort"]
ToyLanguage = Literal["en", "zh"]
ToySplit = Literal["train", "test"]

_LARGEST_TERM = 20
_LENGTHS = (3, 4, 5)
_TEST_SHARE = 10  # one of this number of questions is for testing
_LETTERS = "abcdefghij"
_CHARACTERS = {"copy": "山水火木日月人口天地", "sort": "零一二三四五六七八九"}
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_PROMPTS = {
    ("sums", "en"): "{}+{}=",
    ("sums", "zh"): "{}加{}等于",
    ("copy", "en"): "copy {}:",
    ("copy", "zh"): "复制{}：",  # noqa: RUF001
    ("sort", "en"): "sort {}:",
    ("sort", "zh"): "排序{}：",  # noqa: RUF001
}


def make_toy_data(
    kind: ToyKind,
    count: int,
    seed: int,
    *,
    stage: ChatStage = "sft",
    language: ToyLanguage = "en",
    split: ToySplit = "train",
) -> list[dict[str, Any]]:
    """Return synthetic rows for `chat_data`.

    The same arguments give the same rows in any process. Questions repeat if more rows are requested than
    exist, about 400 for sums.

    Args:
        kind: "sums": `3+4=` and `7`; "copy": the same letters; "sort": letters, or Chinese digits, in order.
        count: Number of rows.
        seed: Seed of the questions.
        stage: "sft": prompt and completion; "preference": prompt, chosen and a wrong answer as rejected;
            "prompts": the prompt. All have the right answer as `answer`.
        language: "en" or "zh".
        split: "train", or "test" for questions outside the training data.

    Raises:
        ValueError: `count` is below 1, or `kind`, `stage`, `language` or `split` is none of those named.
    """
    if count < 1:
        raise ValueError(f"count={count}: give at least 1")
    allowed = (("kind", kind, ToyKind), ("stage", stage, ChatStage), ("language", language, ToyLanguage))
    for name, value, values in (*allowed, ("split", split, ToySplit)):
        if value not in get_args(values):
            raise ValueError(f"{name}={value!r} is none of {', '.join(map(repr, get_args(values)))}")
    draw = random.Random(f"{kind} {split} {seed}")
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        prompt, answer, wrong = _sum(draw, language) if kind == "sums" else _series(draw, kind, language)
        if _is_for_testing(prompt) == (split == "test"):
            rows.append(_row(stage, prompt, answer, wrong))
    return rows


def make_toy_tokenizer() -> Any:
    """Return a tokenizer of transformers with a token for each character of toy data.

    A text begins with `<s>` and ends with `</s>`; its chat template writes one turn per line. It requires the
    libraries transformers and tokenizers.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    texts = (*_PROMPTS.values(), *_CHARACTERS.values(), _LETTERS, string.digits, string.ascii_letters, " \n:")
    tokens = ["<pad>", "<s>", "</s>", "<unk>", *sorted(set("".join(texts)))]
    inner = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    made.chat_template = _TEMPLATE
    return made


def _is_for_testing(prompt: str) -> bool:
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") % _TEST_SHARE == 0


def _row(stage: ChatStage, prompt: str, answer: str, wrong: str) -> dict[str, Any]:
    if stage == "preference":
        return {"prompt": prompt, "chosen": answer, "rejected": wrong, "answer": answer}
    if stage == "sft":
        return {"prompt": prompt, "completion": answer, "answer": answer}
    return {"prompt": prompt, "answer": answer}


def _sum(draw: random.Random, language: ToyLanguage) -> tuple[str, str, str]:
    left, right = draw.randrange(_LARGEST_TERM + 1), draw.randrange(_LARGEST_TERM + 1)
    wrong = abs(left + right + draw.choice((-2, -1, 1, 2)))
    wrong += wrong == left + right
    return _PROMPTS["sums", language].format(left, right), str(left + right), str(wrong)


def _series(draw: random.Random, kind: ToyKind, language: ToyLanguage) -> tuple[str, str, str]:
    alphabet, gap = (_LETTERS, " ") if language == "en" else (_CHARACTERS[kind], "")
    places = draw.sample(range(len(alphabet)), draw.choice(_LENGTHS))
    right = sorted(places) if kind == "sort" else places
    wrong = right.copy()
    one, other = draw.sample(range(len(right)), 2)
    wrong[one], wrong[other] = wrong[other], wrong[one]
    question, answer, mistake = (
        gap.join(alphabet[place] for place in each) for each in (places, right, wrong)
    )
    return _PROMPTS[kind, language].format(question), answer, mistake
