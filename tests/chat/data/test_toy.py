"""Made-up data: right answers, wrong ones that are wrong, the same rows everywhere."""

from itertools import product

import pytest

from colossalai.chat.data import chat_data, encode_sft, make_toy_data, make_toy_tokenizer

pytestmark = pytest.mark.unit

CELLS = list(product(["sums", "copy", "sort"], ["en", "zh"]))
BETWEEN = {"sums": ("", "="), "copy": ("copy ", ":"), "sort": ("sort ", ":")}
BETWEEN_ZH = {"sums": ("", "等于"), "copy": ("复制", "："), "sort": ("排序", "：")}  # noqa: RUF001
DIGITS = "零一二三四五六七八九"
THE_FIRST_OF_SEED_7 = [
    {"prompt": "7+14=", "chosen": "21", "rejected": "20", "answer": "21"},
    {"prompt": "7加14等于", "chosen": "21", "rejected": "20", "answer": "21"},
    {"prompt": "copy h g a:", "chosen": "h g a", "rejected": "h a g", "answer": "h g a"},
    {"prompt": "复制口人山：", "chosen": "口人山", "rejected": "口山人", "answer": "口人山"},  # noqa: RUF001
    {"prompt": "sort a i g:", "chosen": "a g i", "rejected": "g a i", "answer": "a g i"},
    {"prompt": "排序零八六：", "chosen": "零六八", "rejected": "六零八", "answer": "零六八"},  # noqa: RUF001
]


def solve(kind, language, prompt):
    before, after = (BETWEEN if language == "en" else BETWEEN_ZH)[kind]
    question = prompt.removeprefix(before).removesuffix(after)
    assert prompt == before + question + after
    if kind == "sums":
        left, right = question.split("+" if language == "en" else "加")
        return str(int(left) + int(right))
    if kind == "copy":
        return question
    if language == "en":
        return " ".join(sorted(question.split()))
    return "".join(sorted(question, key=DIGITS.index))


@pytest.mark.parametrize(("kind", "language"), CELLS)
@pytest.mark.parametrize("stage", ["sft", "preference", "prompts"])
def test_answers_are_right_and_rejected_ones_wrong(kind, language, stage):
    rows = make_toy_data(kind, 200, 1, stage=stage, language=language)
    assert len(rows) == 200
    assert chat_data(rows).stage == stage
    for row in rows:
        right = solve(kind, language, row["prompt"])
        assert row["answer"] == right
        assert row.get("completion", right) == row.get("chosen", right) == right
        assert row.get("rejected", "") != right
    assert all(("rejected" in row) == (stage == "preference") for row in rows)


@pytest.mark.parametrize(("kind", "language"), CELLS)
def test_no_question_for_testing_is_trained_on(kind, language):
    splits = [
        {
            row["prompt"]
            for seed in range(4)
            for row in make_toy_data(kind, 300, seed, language=language, split=split)
        }
        for split in ("train", "test")
    ]
    assert not splits[0] & splits[1]
    assert min(map(len, splits)) > 20


def test_rows_depend_on_the_seed_alone():
    assert make_toy_data("copy", 20, 1) == make_toy_data("copy", 20, 1) != make_toy_data("copy", 20, 2)
    assert make_toy_data("copy", 20, 1)[:10] == make_toy_data("copy", 10, 1)
    for (kind, language), row in zip(CELLS, THE_FIRST_OF_SEED_7, strict=True):  # in any process
        assert make_toy_data(kind, 1, 7, language=language, stage="preference") == [row]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "products"}, "kind='products' is none of 'sums', 'copy', 'sort'"),
        ({"stage": "ptx"}, "stage='ptx' is none of"),
        ({"language": "de"}, "language='de' is none of 'en', 'zh'"),
        ({"split": "dev"}, "split='dev' is none of 'train', 'test'"),
        ({"count": 0}, "count=0"),
    ],
)
def test_unknown_choices_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_toy_data(**{"kind": "sums", "count": 1, "seed": 0} | arguments)


def test_the_tokenizer_knows_all_toy_data() -> None:
    tokenizer = make_toy_tokenizer()
    for kind, language in CELLS:
        for row in make_toy_data(kind, 50, 0, language=language):
            text = row["prompt"] + row["completion"]
            ids = tokenizer(text).input_ids
            assert ids[0] == tokenizer.bos_token_id
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids[1:]) == text
    messages = [{"role": "user", "content": "3+4="}, {"role": "assistant", "content": "7"}]
    encoded = encode_sft({"messages": messages}, tokenizer, 64)
    learned = [token for token, counts in zip(encoded.input_ids, encoded.loss_mask, strict=True) if counts]
    assert tokenizer.convert_ids_to_tokens(learned) == ["7", "</s>"]
