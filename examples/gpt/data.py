"""Text for the GPT example: find it, split it, train a byte-level BPE on it, and cache the tokens.

Text is cut into contiguous blocks of whole lines; each `VALIDATION_STRIDE`-th block is for validation. The
tokenizer is trained on training blocks only and each block is encoded on its own, so nothing of a validation
block is seen in training. The result is cached under a hash of the text and of all that shapes the tokens.
"""

import hashlib
import json
import os
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset

END_OF_TEXT = "<|endoftext|>"
BLOCK_CHARS = 1 << 16
VALIDATION_STRIDE = 20
VALIDATION_OFFSET = 5  # below 10: even blocks of nearly twice the size reach this one
TOKENIZER_CHARS = 3 << 20
MIN_CHARS = 2000
FORMAT = 1  # part of the cache's name: raise it when the tokens of the same text change

# Folders of the standard library that are tests, tables, generated text, or not the library's own.
NOISE = frozenset({"test", "tests", "idlelib", "lib2to3", "turtledemo", "distutils", "ensurepip"})
NOISE |= {"encodings", "pydoc_data", "site-packages", "dist-packages"}


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Tokens ready to train on.

    Attributes:
        key: Names the text and the way it was cut and encoded.
        folder: Where the cache of these tokens lies.
        train: Training tokens, one dimension.
        validation: Validation tokens, one dimension.
        validation_bytes: Length of the validation text, to turn a loss per token into bits per byte.
    """

    key: str
    folder: Path
    train: np.ndarray
    validation: np.ndarray
    validation_bytes: int

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, read from the cache."""
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @property
    def unigram_entropy(self) -> float:
        """Entropy in nats of a validation token that is drawn by the validation text's own frequencies.

        No model that ignores the context can have a lower loss on this text.
        """
        counts = np.bincount(self.validation)
        frequencies = counts[counts > 0] / self.validation.size
        return float(-(frequencies * np.log(frequencies)).sum())


class TokenWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of `length` tokens over a token array, as (inputs, labels).

    Labels are the inputs: the loss shifts them. Neighbouring windows share one token, so that each token of
    the text but the first is predicted once.

    Args:
        tokens: One-dimensional token array.
        length: Tokens in a window.
    """

    def __init__(self, tokens: np.ndarray, *, length: int) -> None:
        if tokens.size < length:
            raise ValueError(
                f"{tokens.size} tokens of text, but a window is {length}: bring more text or shorten SEQ_LEN"
            )
        self.tokens = tokens
        self.length = length

    def __len__(self) -> int:
        return (self.tokens.size - 1) // (self.length - 1)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return window `index` twice: as inputs and as labels."""
        start = index * (self.length - 1)
        window = torch.from_numpy(self.tokens[start : start + self.length].astype(np.int64))
        return window, window


def read_texts(source: Path | None) -> list[str]:
    """Read the documents, in an order that depends only on their names.

    Args:
        source: A .txt or .jsonl file, a folder of them, or None for the source of Python's standard library.

    Raises:
        ValueError: There is no such file, no text in it, or a line of a .jsonl file has no field `text`.
    """
    if source is None:
        folder = Path(sysconfig.get_path("stdlib"))
        files = sorted(
            path for path in folder.rglob("*.py") if NOISE.isdisjoint(path.relative_to(folder).parts)
        )
        if not files:
            raise ValueError(f"no *.py in {folder}, this Python has no library source: pass --data PATH")
    elif source.is_dir():
        files = sorted(path for path in source.rglob("*") if path.suffix in (".txt", ".jsonl"))
        if not files:
            raise ValueError(f"no *.txt or *.jsonl in {source}: pass a folder that has some, or one file")
    elif source.is_file() and source.suffix in (".txt", ".jsonl"):
        files = [source]
    else:
        raise ValueError(f"--data {source}: a .txt file, a .jsonl file or a folder of them is needed")
    return [text for path in files for text in _read_file(path) if text]


def load_text_data(source: Path | None, *, cache: Path, vocab_size: int) -> TextData:
    """Return the tokens of a text, from the cache or freshly made.

    Call it on one process first: two that fill the same cache do the same work twice, though without harm.

    Args:
        source: As in `read_texts`.
        cache: Folder that holds the caches of all texts.
        vocab_size: Tokens of the tokenizer, at most 65536.

    Raises:
        ValueError: The text is too short to split, or `vocab_size` does not fit the cache's 16-bit tokens.
    """
    if not 257 <= vocab_size <= 1 << 16:
        raise ValueError(f"vocab_size={vocab_size}: from 257 (all bytes and the end of text) to 65536")
    text = END_OF_TEXT.join(read_texts(source))
    if len(text) < MIN_CHARS:
        raise ValueError(
            f"{len(text)} characters of text: at least {MIN_CHARS} are needed to train and validate"
        )
    recipe = (
        f"{FORMAT} {vocab_size} {BLOCK_CHARS} {VALIDATION_STRIDE} {VALIDATION_OFFSET} {TOKENIZER_CHARS}\n"
    )
    key = hashlib.sha256((recipe + text).encode()).hexdigest()[:16]
    folder = cache / key
    if not folder.is_dir():
        _fill_cache(folder, text, vocab_size=vocab_size)
    return TextData(
        key=key,
        folder=folder,
        train=np.load(folder / "train.npy"),
        validation=np.load(folder / "validation.npy"),
        validation_bytes=json.loads((folder / "meta.json").read_text())["validation_bytes"],
    )


def split_blocks(text: str) -> tuple[list[str], list[str]]:
    """Cut a text into contiguous blocks that end with a line and return (training, validation) blocks.

    A text without line ends is cut anywhere. Together the blocks are the text, none overlaps another.
    """
    blocks = list(_blocks(text, size=min(BLOCK_CHARS, len(text) // VALIDATION_STRIDE)))
    validation = blocks[VALIDATION_OFFSET::VALIDATION_STRIDE]
    training = [block for index, block in enumerate(blocks) if index % VALIDATION_STRIDE != VALIDATION_OFFSET]
    return training, validation


def _blocks(text: str, *, size: int) -> Iterator[str]:
    start = 0
    while start < len(text):
        line_end = text.find("\n", start + size, start + 2 * size)
        stop = start + size if line_end < 0 else line_end + 1
        yield text[start:stop]
        start = stop


def _read_file(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _text_field(line, where=f"{path}:{number}")


def _text_field(line: str, *, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not a JSON line: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ValueError(f'{where}: each line must be an object with a string in its field "text"')
    return record["text"]


def _fill_cache(folder: Path, text: str, *, vocab_size: int) -> None:
    """Write the cache beside its place and rename it: a cache that exists is complete."""
    training, validation = split_blocks(text)
    tokenizer = _train_tokenizer(training, vocab_size=vocab_size)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, suffix=".tmp") as name:
        draft = Path(name) / "cache"
        draft.mkdir()
        tokenizer.save(str(draft / "tokenizer.json"))
        np.save(draft / "train.npy", _encode(tokenizer, training))
        np.save(draft / "validation.npy", _encode(tokenizer, validation))
        meta = {"validation_bytes": sum(len(block.encode()) for block in validation)}
        (draft / "meta.json").write_text(json.dumps(meta))
        try:
            os.rename(draft, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, with the same content
                raise


def _train_tokenizer(blocks: Sequence[str], *, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    stride = max(1, sum(len(block) for block in blocks) // TOKENIZER_CHARS)
    tokenizer.train_from_iterator(blocks[::stride], trainer)
    return tokenizer


def _encode(tokenizer: Tokenizer, blocks: Sequence[str]) -> np.ndarray:
    # Encoding by the line would be slower, by the whole text would not use the tokenizer's threads.
    encoded = tokenizer.encode_batch_fast(blocks)
    return np.concatenate([np.asarray(block.ids, dtype=np.uint16) for block in encoded])
