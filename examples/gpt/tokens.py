"""Tokens for the GPT example: train a byte-level BPE on a text, encode it, and cache the tokens.

The tokenizer is trained on training blocks only and each block is encoded on its own, so nothing of a
validation block is seen in training. The cache is named by a hash of the text and of all that shapes tokens.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from data import TextData
from text import BLOCK_CHARS, VALIDATION_OFFSET, VALIDATION_STRIDE, read_texts, split_blocks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_CHARS = 3 << 20
MIN_CHARS = 2000
FORMAT = 1  # part of the cache's name: raise it when the tokens of the same text change


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
        print(
            f"cutting {len(text) / 1e6:.1f} MB of text into tokens, once; they are kept in {cache}",
            flush=True,
        )
        _fill_cache(folder, text, vocab_size=vocab_size)
    return TextData(
        key=key,
        folder=folder,
        train=np.load(folder / "train.npy"),
        validation=np.load(folder / "validation.npy"),
        validation_bytes=json.loads((folder / "meta.json").read_text())["validation_bytes"],
    )


def _fill_cache(folder: Path, text: str, *, vocab_size: int) -> None:
    """Write the cache under a temporary name and rename it: a cache that exists is complete."""
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
