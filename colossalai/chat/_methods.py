"""Methods that learn from given texts: supervised fine-tuning, reward models, DPO.

Each is a frozen value with its options. `fit` trains any model of transformers with the parallel methods of a
booster, `evaluate` measures without training.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from colossalai.booster import Booster
from colossalai.chat import losses
from colossalai.chat._fit import Task, all_known, boost_for_looking, look
from colossalai.chat._heads import has_value_head, last_values
from colossalai.chat._records import Measures
from colossalai.chat._text_method import (
    Encoded,
    GivenData,
    ReferredData,
    ReferredPair,
    TextMethod,
    check_length,
    check_readable,
    count_of,
    logits_of,
    packed_batch,
    padding_of,
    pair_batch,
    text_batch,
)
from colossalai.chat.data import EncodedData, pack
from colossalai.runtime import ModelWrapper


@dataclass(frozen=True, kw_only=True)
class SFT(TextMethod):
    """Supervised fine-tuning: the cross entropy of completions, the first stage of InstructGPT (2203.02155).

    Attributes:
        max_length: Maximum number of tokens of a text.
        pack: Whether texts are concatenated into sequences of up to `max_length` tokens, with attention
            within each text: the loss of a text is unchanged, and there is less padding. A row of a batch is
            then a sequence. For models with `sdpa` attention.

    Raises:
        ValueError: `max_length` is below 2.
    """

    max_length: int = 512
    pack: bool = False

    def __post_init__(self) -> None:
        check_length(self.max_length)

    @property
    def _stage(self) -> str:
        return "sft"

    def _check(self, model: nn.Module, booster: Booster) -> None:
        if self.pack:
            _check_packing(model, booster, self.max_length)

    def _task(self, encoded: Encoded, tokenizer: Any) -> Task:
        def criterion(output: Any, labels: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            mask = labels["loss_mask"] & labels["counts"].unsqueeze(1)
            loss = losses.sft_loss(logits_of(output), labels["input_ids"], mask, num_tokens=1)
            return loss, mask[:, 1:].sum()

        assert isinstance(encoded, EncodedData), "of stage sft"
        return Task(
            rows=pack(encoded.texts, self.max_length) if self.pack else encoded,
            collate=partial(packed_batch if self.pack else text_batch, pad=padding_of(tokenizer)),
            criterion=criterion,
            measures=Measures(),
        )


def _check_packing(model: nn.Module, booster: Booster, max_length: int) -> None:
    """Check that texts of a packed sequence do not affect each other in a model.

    Raises:
        ValueError: `model` has another attention than `sdpa`, which takes other masks; takes no
            `position_ids`; keeps a state along a sequence; or has a window shorter than `max_length`.
    """
    raw: Any = model.unwrap() if isinstance(model, ModelWrapper) else model
    config, family = raw.config, type(raw).__name__
    attention = getattr(config, "_attn_implementation", None)
    if attention != "sdpa":
        raise ValueError(
            f"pack=True and the attention {attention!r} of {family}: masks of packed texts are made for "
            "'sdpa'; load the model with attn_implementation='sdpa', or leave pack out"
        )
    whole = raw.get_base_model() if hasattr(raw, "get_base_model") else raw  # without adapters
    is_stage = isinstance(model, ModelWrapper) and model.pipeline is not None  # its forward has no signature
    if not is_stage and "position_ids" not in inspect.signature(whole.forward).parameters:
        raise ValueError(
            f"pack=True and {family}, which takes no position_ids: the texts of a sequence would be counted "
            "on; leave pack out"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    window = getattr(config, "sliding_window", None)
    if getattr(whole, "_is_stateful", False) or kinds - {"sliding_attention"}:
        raise ValueError(
            f"pack=True and {family}, whose layers carry a state from text to text: leave it out"
        )
    if window is not None and window < max_length and getattr(config, "use_sliding_window", True):
        raise ValueError(
            f"pack=True, max_length={max_length} and a sliding window of {window} tokens: a packed text "
            f"would see beyond it; give max_length={window}, or leave pack out"
        )
    if booster.mesh.axis_size("sp") > 1:
        raise ValueError(
            "pack=True under sequence parallelism, which cuts sequences without regard to texts: leave it out"
        )


@dataclass(frozen=True, kw_only=True)
class RewardModeling(TextMethod):
    """A reward model from comparisons: the second stage of InstructGPT (2203.02155, equation 1).

    The model is one of `with_value_head`. Metrics are the loss, the accuracy (share of pairs whose chosen
    text has the higher reward), and the margin (mean difference of rewards).

    Attributes:
        max_length: Maximum number of tokens of a text.
        disable_dropout: Whether to train without dropout, ignoring the model's config.

    Raises:
        ValueError: `max_length` is below 2.
    """

    max_length: int = 512
    disable_dropout: bool = True

    def __post_init__(self) -> None:
        check_length(self.max_length)

    @property
    def _stage(self) -> str:
        return "preference"

    @property
    def _disables_dropout(self) -> bool:
        return self.disable_dropout

    def _check(self, model: nn.Module, booster: Booster) -> None:
        if not has_value_head(model):
            raise ValueError(
                f"{type(model).__name__} has no value head with one output per token: give the result of "
                "with_value_head(model) or load_reward_model(folder)"
            )

    def _task(self, encoded: Encoded, tokenizer: Any) -> Task:
        measures = Measures()

        def criterion(output: Any, labels: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            counts = labels["counts"][::2]
            rewards = last_values(output, labels["attention_mask"])
            chosen, rejected = rewards[::2][counts], rewards[1::2][counts]
            measures.add_pairs(chosen, rejected)
            return losses.log_sig_loss(chosen, rejected, num_sequences=1), count_of(chosen)

        return Task(
            rows=encoded,
            collate=partial(pair_batch, pad=padding_of(tokenizer)),
            criterion=criterion,
            measures=measures,
            measured=Measures.PAIRS,
            group=2,
        )


@dataclass(frozen=True, kw_only=True)
class DPO(TextMethod):
    """Direct preference optimization (2305.18290): a policy learns from comparisons without a reward model.

    The reference is the model before its first step: its log-probabilities of all completions are computed
    once at the start, without a second model. `with_reference` does the same for another model, or for data
    to be evaluated later. Metrics are the loss, and accuracy and margin of the implied rewards.

    Attributes:
        max_length: Maximum number of tokens of a text.
        beta: Strength of the divergence penalty to the reference.
        kind: "sigmoid", or "ipo" (2310.12036).
        label_smoothing: Assumed share of wrong comparisons, for "sigmoid".
        disable_dropout: Whether to train without dropout, ignoring the model's config. The reference is
            computed without dropout, so with it the policy differs from the reference before the first step.

    Raises:
        ValueError: `max_length` is below 2.
    """

    max_length: int = 512
    beta: float = 0.1
    kind: Literal["sigmoid", "ipo"] = "sigmoid"
    label_smoothing: float = 0.0
    disable_dropout: bool = True

    def __post_init__(self) -> None:
        check_length(self.max_length)
        nothing = torch.zeros(1)  # let the loss check its options
        losses.dpo_loss(*[nothing] * 4, beta=self.beta, kind=self.kind, label_smoothing=self.label_smoothing)

    @property
    def _stage(self) -> str:
        return "preference"

    @property
    def _disables_dropout(self) -> bool:
        return self.disable_dropout

    def with_reference(
        self,
        data: GivenData,
        reference: nn.Module,
        *,
        booster: Booster,
        tokenizer: Any,
        batch_size: int = 8,
    ) -> ReferredData:
        """Add the log-probabilities of a reference to rows; collective.

        Args:
            data: Rows of comparisons.
            reference: The model, as it is or boosted.
            booster: The parallel methods.
            tokenizer: The tokenizer of the model.
            batch_size: Number of rows of a batch on one data-parallel rank.

        Raises:
            ValueError: `data` is of another stage, has nothing to learn from or texts longer than the window
                of `reference`, or the model cannot be built for the methods of `booster`.
        """
        encoded = self.encode(data, tokenizer)
        if isinstance(encoded, ReferredData):
            raise ValueError("these rows have a reference already: give the data that they were made from")
        check_readable([text for pair in encoded.pairs for text in pair], reference, name="reference")
        return self._add_reference(
            boost_for_looking(booster, reference), booster, encoded, tokenizer, batch_size
        )

    def _prepare(
        self, model: ModelWrapper, booster: Booster, encoded: Encoded, tokenizer: Any, batch_size: int
    ) -> Encoded:
        if isinstance(encoded, ReferredData):
            return encoded
        return self._add_reference(model, booster, encoded, tokenizer, batch_size)

    def _add_reference(
        self, model: ModelWrapper, booster: Booster, encoded: EncodedData, tokenizer: Any, batch_size: int
    ) -> ReferredData:
        found: dict[int, tuple[float, float]] = {}

        def criterion(output: Any, labels: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            logps = self._logprobs(output, labels)
            for number, chosen, rejected in zip(
                labels["reference"][::2].long().tolist(),
                logps[::2].tolist(),
                logps[1::2].tolist(),
                strict=True,
            ):
                found[number] = (chosen, rejected)
            return logps.sum(), count_of(logps)

        # Rows carry their indices instead of log-probabilities.
        rows = [ReferredPair(pair, number, number) for number, pair in enumerate(encoded.pairs)]
        task = Task(
            rows=rows,
            collate=partial(pair_batch, pad=padding_of(tokenizer)),
            criterion=criterion,
            measures=Measures(),
            group=2,
        )
        look(model, booster=booster, task=task, batch_size=batch_size)
        known = all_known(found, len(rows), booster)
        return ReferredData(
            rows=tuple(ReferredPair(pair, *each) for pair, each in zip(encoded.pairs, known, strict=True)),
            is_mean=self.kind == "ipo",
        )

    def _logprobs(self, output: Any, labels: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probabilities of completions, (2 * pairs,)."""
        logp = losses.token_logprobs(logits_of(output)[:, :-1], labels["input_ids"][:, 1:])
        return losses.sequence_logprobs(logp, labels["loss_mask"][:, 1:], mean=self.kind == "ipo")

    def _task(self, encoded: Encoded, tokenizer: Any) -> Task:
        if not isinstance(encoded, ReferredData) or encoded.is_mean != (self.kind == "ipo"):
            raise ValueError(
                f"these rows have no log-probabilities of a reference for kind={self.kind!r}: call "
                "with_reference(data, model, ...) before the model is trained, and evaluate the result"
            )
        measures = Measures()

        def criterion(output: Any, labels: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            counts = labels["counts"][::2]
            logps, reference = self._logprobs(output, labels), labels["reference"]
            loss, chosen, rejected = losses.dpo_loss(
                *(logps[::2][counts], logps[1::2][counts]),
                *(reference[::2][counts], reference[1::2][counts]),
                beta=self.beta,
                kind=self.kind,
                label_smoothing=self.label_smoothing,
                num_sequences=1,
            )
            measures.add_pairs(chosen, rejected)
            return loss, count_of(chosen)

        return Task(
            rows=encoded,
            collate=partial(pair_batch, pad=padding_of(tokenizer)),
            criterion=criterion,
            measures=measures,
            measured=Measures.PAIRS,
            group=2,
        )
