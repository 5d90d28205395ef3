"""The text of the GPT example: reading, splitting, encoding, caching."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from tests.examples.scripts import example_module

pytestmark = pytest.mark.unit

data = example_module("gpt/data.py")
text_module = example_module("gpt/text.py")
tokens = example_module("gpt/tokens.py")
TEXT = "".join(f"line {number}: the quick brown fox number {number * 7919 % 1000}\n" for number in range(400))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # or the tokenizer's threads outlive the test


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.jsonl").write_text('{"text": "first"}\n\n{"text": "also first", "id": 3}\n')
    (tmp_path / "c.md").write_text("not read")
    assert text_module.read_texts(tmp_path) == ["first", "also first", "second"]


def test_without_a_path_the_library_is_read_without_its_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json/__init__.py", "abc.py", "test/test_abc.py", "site-packages/other.py", "abc.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(
        text_module.sysconfig, "get_path", lambda name: str(tmp_path) if name == "stdlib" else ""
    )
    assert text_module.read_texts(None) == ["abc.py", "json/__init__.py"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"text": "a"}\n{"body": "b"}\n', r'x.jsonl:2: .*"text"'),
        ("x.jsonl", '{"text": 3}\n', r'x.jsonl:1: .*"text"'),
        ("x.jsonl", "{not json}\n", "x.jsonl:1: not a JSON line"),
        ("x.pdf", "", r"x.pdf: a .txt file, a .jsonl file or a folder"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        text_module.read_texts(tmp_path / name)


def test_an_empty_folder_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \*.txt or \*.jsonl in"):
        text_module.read_texts(tmp_path)
    with pytest.raises(ValueError, match=r"gone.txt: a .txt file"):
        text_module.read_texts(tmp_path / "gone.txt")


@pytest.mark.parametrize("text", [TEXT, TEXT.replace("\n", " "), "x" * 99 + "\n" + TEXT])
def test_blocks_are_the_text_in_order_without_overlap(text: str) -> None:
    training, validation = text_module.split_blocks(text)
    order = text_module.VALIDATION_OFFSET
    assert len(validation) == 1
    assert "".join([*training[:order], *validation, *training[order:]]) == text
    assert 0.02 < len(validation[0]) / len(text) < 0.15


def test_no_line_of_the_validation_text_is_trained_on() -> None:
    training, validation = text_module.split_blocks(TEXT)
    lines = [set("".join(blocks).splitlines()) for blocks in (training, validation)]
    assert len(lines[0] | lines[1]) == 400
    assert not lines[0] & lines[1]


def test_tokens_stand_for_the_text(text_file: Path, tmp_path: Path) -> None:
    loaded = tokens.load_text_data(text_file, cache=tmp_path / "cache", vocab_size=300)
    training, validation = text_module.split_blocks(TEXT)
    assert loaded.tokenizer.decode(loaded.train.tolist()) == "".join(training)
    assert loaded.tokenizer.decode(loaded.validation.tolist()) == "".join(validation)
    assert loaded.validation_bytes == len("".join(validation))
    assert loaded.tokenizer.get_vocab_size() == 300


def test_documents_are_kept_apart(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(TEXT)
    loaded = tokens.load_text_data(tmp_path, cache=tmp_path / "cache", vocab_size=300)
    end = loaded.tokenizer.token_to_id(tokens.END_OF_TEXT)
    assert (loaded.train == end).sum() + (loaded.validation == end).sum() == 1


def test_the_second_time_the_cache_serves(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tokens.load_text_data(text_file, cache=tmp_path / "cache", vocab_size=300)
    monkeypatch.setattr(tokens, "_fill_cache", lambda *args, **kwargs: pytest.fail("filled again"))
    second = tokens.load_text_data(text_file, cache=tmp_path / "cache", vocab_size=300)
    assert np.array_equal(first.train, second.train)
    assert os.listdir(tmp_path / "cache") == [first.key]


def test_another_text_or_vocabulary_has_another_cache(text_file: Path, tmp_path: Path) -> None:
    keys = {tokens.load_text_data(text_file, cache=tmp_path, vocab_size=size).key for size in (280, 300)}
    text_file.write_text(TEXT + "one line more\n")
    keys.add(tokens.load_text_data(text_file, cache=tmp_path, vocab_size=300).key)
    assert len(keys) == 3


def test_unigram_entropy_is_that_of_the_validation_tokens(tmp_path: Path) -> None:
    tokens = np.array([5, 5, 5, 9], dtype=np.uint16)
    loaded = data.TextData(key="", folder=tmp_path, train=tokens, validation=tokens, validation_bytes=4)
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert loaded.unigram_entropy == pytest.approx(expected)


def test_windows_predict_each_token_once() -> None:
    windows = data.TokenWindows(np.arange(100, dtype=np.uint16), length=10)
    assert len(windows) == 11
    predicted = [token for index in range(len(windows)) for token in windows[index][1][1:].tolist()]
    assert predicted == list(range(1, 100))
    assert all(windows[index][0].tolist() == windows[index][1].tolist() for index in range(11))


@pytest.mark.parametrize(
    ("text", "vocab_size", "message"),
    [("short", 300, "5 characters"), (TEXT, 100, "vocab_size=100"), (TEXT, 70_000, "vocab_size=70000")],
)
def test_impossible_requests_are_refused(text: str, vocab_size: int, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"text": text}))
    with pytest.raises(ValueError, match=message):
        tokens.load_text_data(path, cache=tmp_path / "cache", vocab_size=vocab_size)


def test_too_little_text_for_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="5 tokens of text, but a window is 10"):
        data.TokenWindows(np.arange(5, dtype=np.uint16), length=10)
