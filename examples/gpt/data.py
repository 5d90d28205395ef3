"""Tokens as a training sees them: arrays, the line to beat, and windows over them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Tokens ready to train on.

    Attributes:
        key: Names the text and the way it was cut and encoded.
        folder: Folder of the cache of these tokens.
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
