"""Common part of methods that learn from texts: fit, evaluate, and batches of texts and comparisons."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from colossalai.booster import Booster
from colossalai.chat._course import CourseOptions, course_of
from colossalai.chat._fit import Batch, FitResult, Task, boost, boost_for_looking, look, train
from colossalai.chat._memory import tell_memory
from colossalai.chat._records import Record
from colossalai.chat.data import (
    ChatData,
    EncodedData,
    EncodedPair,
    EncodedText,
    PackedText,
    collate,
    collate_packed,
    collate_pairs,
    encode_all,
)
from colossalai.logging import get_dist_logger
from colossalai.pipeline import ModelStage
from colossalai.runtime import ModelWrapper


class ReferredPair(NamedTuple):
    """A comparison, and the log-probabilities of its answers under a reference."""

    pair: EncodedPair
    chosen: float
    rejected: float


@dataclass(frozen=True, kw_only=True)
class ReferredData:
    """Comparisons with the log-probabilities of a reference; a dataset for torch's loaders.

    Attributes:
        rows: The comparisons.
        is_mean: Whether the log-probabilities are means over tokens, for "ipo", or sums.
    """

    rows: tuple[ReferredPair, ...]
    is_mean: bool

    @property
    def stage(self) -> str:
        """Stage of the rows."""
        return "preference"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> ReferredPair:
        return self.rows[index]


Encoded = EncodedData | ReferredData
GivenData = ChatData | Encoded


@contextmanager
def dropout_disabled(model: nn.Module) -> Iterator[None]:
    """Set all dropout probabilities of a model to 0 within the block, including those of adapters.

    They are `p` of torch's dropout modules, and float attributes of other modules: `dropout` of a layer of
    OPT.
    """
    before: list[tuple[nn.Module, str, float]] = []
    for module in _all_modules(model):
        for name, value in vars(module).items():
            is_named = "dropout" in name or name.endswith("pdrop")
            is_probability = name == "p" if isinstance(module, nn.modules.dropout._DropoutNd) else is_named
            if is_probability and type(value) is float and value > 0.0:
                before.append((module, name, value))
    for module, name, _ in before:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _all_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a model, including those that a stage calls without owning their parameters."""
    for module in model.modules():
        yield module
        if isinstance(module, ModelStage):
            yield from module.model.modules()


def encoded_of(data: GivenData, tokenizer: Any, max_length: int) -> Encoded:
    """Tokenize rows, unless they are encoded already.

    Rank 0 logs the number of rows that are too long and left out, and of tokens truncated from prompts.

    Raises:
        ValueError: `data` is not chat data, or has nothing to learn from.
    """
    if isinstance(data, EncodedData | ReferredData):
        return data
    if not isinstance(data, ChatData):
        raise ValueError(f"data is of type {type(data).__name__}: give chat_data(path or rows)")
    encoded = encode_all(data, tokenizer, max_length)
    if encoded.num_left_out or encoded.num_cut:
        get_dist_logger().warning(
            f"max_length={max_length}: {encoded.num_left_out} of {len(data)} rows are left out, which are "
            f"too long, and the prompts of others lose {encoded.num_cut} tokens at their begin",
            ranks=[0],
        )
    return encoded


class TextMethod(ABC):
    """Abstract: a method that learns from texts.

    Attributes:
        max_length: Maximum number of tokens of a text; longer prompts are truncated at the beginning, see
            `encode_all`.
    """

    max_length: int

    def fit(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        booster: Booster,
        data: GivenData,
        tokenizer: Any,
        **course: Unpack[CourseOptions],
    ) -> FitResult:
        """Train a model; collective.

        Args:
            model: The model, as it is or boosted together with `optimizer`.
            optimizer: Its optimizer.
            booster: The parallel methods.
            data: Rows of the method's stage, or the result of `encode_all`.
            tokenizer: The tokenizer of the model.
            course: Length, optimization and records: the attributes of `Course`, with `steps` or `epochs`.

        Raises:
            ValueError: `data` is of another stage, or has nothing to learn from; `steps` or another number is
                out of range; or `model` cannot be built for the methods of `booster`.
        """
        made = course_of(course)
        self._check(model, booster)
        found = self.encode(data, tokenizer)  # raises before the model is changed
        _check_rows_readable(found, model)
        wrapped, boosted = boost(booster, model, optimizer)
        tell_memory({"model": (wrapped, boosted)}, booster=booster, course=made)
        encoded = self._prepare(wrapped, booster, found, tokenizer, made.batch_size)
        task = self._task(encoded, tokenizer)
        with dropout_disabled(wrapped) if self._disables_dropout else nullcontext():
            return train(wrapped, boosted, booster=booster, task=task, course=made)

    def evaluate(
        self,
        model: nn.Module,
        *,
        booster: Booster,
        data: GivenData,
        tokenizer: Any,
        batch_size: int = 8,
    ) -> Record:
        """Return the metrics of `fit` as means over all rows, without training; collective.

        Args:
            model: The model, as it is or boosted.
            booster: The parallel methods.
            data: Rows, as for `fit`.
            tokenizer: The tokenizer of the model.
            batch_size: Number of rows of a batch on one data-parallel rank.

        Raises:
            ValueError: `data` is of another stage or has nothing to learn from, or the model cannot be built
                for the methods of `booster`.
        """
        self._check(model, booster)
        encoded = self.encode(data, tokenizer)
        _check_rows_readable(encoded, model)
        return look(
            boost_for_looking(booster, model),
            booster=booster,
            task=self._task(encoded, tokenizer),
            batch_size=batch_size,
        )

    def encode(self, data: GivenData, tokenizer: Any) -> Encoded:
        """Tokenize rows.

        Raises:
            ValueError: `data` is not chat data, is of another stage, or has nothing to learn from.
        """
        encoded = encoded_of(data, tokenizer, self.max_length)
        if encoded.stage != self._stage:
            raise ValueError(
                f"{type(self).__name__} learns from rows of stage {self._stage!r}, and these are of "
                f"{encoded.stage!r}: give other data, or chat_data(..., stage=...) if they are both"
            )
        return encoded

    @property
    @abstractmethod
    def _stage(self) -> str:
        """Stage of the rows."""

    @abstractmethod
    def _task(self, encoded: Encoded, tokenizer: Any) -> Task:
        """Return the batches and the loss."""

    @property
    def _disables_dropout(self) -> bool:
        """Whether to train without dropout, ignoring the model's config."""
        return False

    def _check(self, model: nn.Module, booster: Booster) -> None:  # noqa: B027 - most take any
        """Reject models that the method does not train, before anything is changed."""

    def _prepare(
        self, model: ModelWrapper, booster: Booster, encoded: Encoded, tokenizer: Any, batch_size: int
    ) -> Encoded:
        """Return rows with everything computed before the first step."""
        return encoded


def _check_rows_readable(encoded: Encoded, model: Any) -> None:
    """Check that a model can read rows; see `check_readable`."""
    pairs = (row.pair if isinstance(row, ReferredPair) else row for row in encoded.rows)
    texts = [text for row in pairs for text in (row if isinstance(row, EncodedPair) else (row,))]
    check_readable(texts, model)


def check_readable(
    texts: Sequence[EncodedText], model: Any, *, name: str = "model", most_tokens: int = 0
) -> None:
    """Reject tokens or positions without embeddings in a model, for which accelerators give no clear error.

    The texts themselves are measured: a `max_length` above the window is allowed if no text needs it.

    Args:
        texts: Texts, or prompts, at least one.
        model: A model of transformers; a missing window or vocabulary is not checked.
        name: Name of the model in errors.
        most_tokens: Maximum number of tokens of an answer after each text.

    Raises:
        ValueError: `texts` has a token outside the vocabulary of the model, or a text that, with an answer,
            exceeds its window.
    """
    config = getattr(model, "config", None)
    known, window = (getattr(config, each, None) for each in ("vocab_size", "max_position_embeddings"))
    largest, longest = (max(measure(text.input_ids) for text in texts) for measure in (max, len))
    if known is not None and largest >= known:
        raise ValueError(
            f"the rows have token {largest}, and the {name} has {known} tokens: give the tokenizer of the "
            "model, or resize the model (resize_token_embeddings)"
        )
    if window is None or longest + most_tokens <= window:
        return
    if not most_tokens:
        raise ValueError(
            f"the rows have a text of {longest} tokens, and the {name} sees {window}: give max_length="
            f"{window} (--max_len {window} of the scripts)"
        )
    rooms = {
        "max_length={0} (--max_len {0} of the scripts)": window - most_tokens,
        "max_tokens={0} (--max_new_tokens {0} of the scripts)": window - longest,
    }
    fewer = [words.format(room) for words, room in rooms.items() if room > 1] or ["less of both"]
    raise ValueError(
        f"a prompt of {longest} tokens and an answer of up to max_tokens={most_tokens} do not fit into the "
        f"{window} tokens that the {name} sees: give {', or '.join(fewer)}"
    )


def text_batch(rows: Sequence[EncodedText], *, pad: int) -> Batch:
    """Return a batch of texts."""
    return _batch_of(collate(rows, pad_token_id=pad))


def packed_batch(rows: Sequence[PackedText], *, pad: int) -> Batch:
    """Return a batch of packed sequences, with the masks of `sdpa` attention."""
    made = collate_packed(rows, pad_token_id=pad)
    data, labels = _batch_of(made)
    return data | {"position_ids": made["position_ids"]}, labels


def pair_batch(rows: Sequence[EncodedPair | ReferredPair], *, pad: int) -> Batch:
    """Return a batch of comparisons: chosen and rejected alternate, (2 * pairs, length)."""
    pairs = [each.pair if isinstance(each, ReferredPair) else each for each in rows]
    data, labels = _batch_of(collate_pairs(pairs, pad_token_id=pad))
    labels["attention_mask"] = data["attention_mask"]
    referred = [each for each in rows if isinstance(each, ReferredPair)]
    if referred:
        numbers = [number for each in referred for number in (each.chosen, each.rejected)]
        labels["reference"] = torch.tensor(numbers, dtype=torch.float64)
    return data, labels


def _batch_of(made: Mapping[str, Tensor]) -> Batch:
    data = {name: made[name] for name in ("input_ids", "attention_mask")}
    labels = {name: made[name] for name in ("input_ids", "loss_mask")}
    return data, labels | {"counts": torch.ones(len(made["input_ids"]), dtype=torch.bool)}


def logits_of(output: Any) -> Tensor:
    """Return the logits, (batch, length, vocabulary), of a language model's output."""
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


def padding_of(tokenizer: Any) -> int:
    """Return the padding token; masked everywhere, so any token of the vocabulary is suitable.

    The end-of-sequence token comes first: a padding token is often added to a tokenizer without resizing the
    model.
    """
    known = (getattr(tokenizer, name, None) for name in ("eos_token_id", "pad_token_id"))
    return next((int(each) for each in known if each is not None), 0)


def count_of(values: Tensor) -> Tensor:
    return torch.tensor(float(len(values)), device=values.device)


def check_length(max_length: int) -> None:
    if type(max_length) is not int or max_length < 2:
        raise ValueError(
            f"max_length={max_length!r}: give an integer of at least 2, one token that predicts another"
        )
