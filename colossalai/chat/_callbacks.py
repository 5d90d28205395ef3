"""Callbacks of a run that learns from rewards: samples, warnings, and its early end.

All ranks have the same records, so a decision based on them alone is the same on all ranks.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from colossalai.chat._records import Record, StepLines
from colossalai.logging import get_dist_logger

LARGEST_GAP = "logprob_gap_largest"
"""The largest |log p(engine) - log p(trainer)| of a token over all ranks."""
KL_NAME = "kl_to_reference"
PATIENCE = 10
"""Number of consecutive steps with too large a divergence that end a run."""
_WIDE_GAP = 0.02  # error of a log-probability after two roundings to bfloat16


class PolicyDriftError(RuntimeError):
    """The model diverges too far from its reference; raised on all ranks, after its state is saved."""


class Gap(NamedTuple):
    """The largest difference between engine and trainer in a batch.

    Attributes:
        size: The difference, a tensor that is not synchronized yet.
        place: Index in the flattened batch, (batch * (length - 1),).
        input_ids: The batch, (batch, length).
        loss_mask: Mask of the answers, (batch, length).
        engine: Log-probabilities of the engine, (batch, length - 1).
        trainer: Log-probabilities of the trainer.
    """

    size: Tensor
    place: Tensor
    input_ids: Tensor
    loss_mask: Tensor
    engine: Tensor
    trainer: Tensor

    def told(self, tokenizer: Any) -> str:
        """Return a description of the difference."""
        row, column = divmod(int(self.place), self.engine.shape[1])
        ids, is_answer = self.input_ids[row].tolist(), self.loss_mask[row].tolist()
        begin, token = is_answer.index(True), ids[column + 1]
        return (
            f"token {token} ({tokenizer.decode([token])!r}), number {column + 1 - begin} of an answer to "
            f"{tokenizer.decode(ids[:begin])!r}, has log-probability {float(self.engine[row, column]):.4f} "
            f"from the engine and {float(self.trainer[row, column]):.4f} from the trainer"
        )


class RewardWatch:
    """Checks each record of a run: warns once of anomalies, and ends a run that drifts away.

    Args:
        tokenizer: The tokenizer of the model.
        max_kl: Largest mean divergence from the reference, by k3; None for no limit.
    """

    def __init__(self, tokenizer: Any, *, max_kl: float | None) -> None:
        self._tokenizer, self._max_kl = tokenizer, max_kl
        self._num_above = 0
        self._gaps: list[Gap] = []
        self._told: set[str] = set()

    def note(self, gap: Gap) -> None:
        """Store a difference on this rank until the end of the step."""
        self._gaps.append(gap)

    def __call__(self, record: Record) -> Exception | None:
        """Return the error that ends the run, if any."""
        gaps, self._gaps = self._gaps, []
        largest = record.get(LARGEST_GAP, 0.0)
        # A NaN causes a warning, too.
        if not largest <= _WIDE_GAP and self._is_new(LARGEST_GAP):
            own = max(gaps, key=lambda each: float(each.size), default=None)
            if own is not None and not float(own.size) < largest:  # the rank with the largest one warns
                get_dist_logger().warning(
                    f"step {record['step']}: log-probabilities of engine and trainer differ by "
                    f"{largest:.4f}, more than {_WIDE_GAP}: {own.told(self._tokenizer)}. Answers are learned "
                    "as if the trainer had drawn them; compute both in the same precision, and train "
                    "without dropout, which the engine has not"
                )
        if record.get("groups_alike", 0.0) == 1.0 and self._is_new("groups_alike"):
            get_dist_logger().warning(
                f"step {record['step']}: in each group all rewards are equal, so nothing is learned from "
                "them; give easier or harder prompts, or a reward that differs between answers",
                ranks=[0],
            )
        return self._drift(record)

    def _is_new(self, name: str) -> bool:
        is_new = name not in self._told
        self._told.add(name)
        return is_new

    def _drift(self, record: Record) -> Exception | None:
        if self._max_kl is None:
            return None
        found = record.get(KL_NAME)
        if found is None:  # a step of PPO whose answers do not count
            return None
        self._num_above = 0 if found <= self._max_kl else self._num_above + 1
        if self._num_above < PATIENCE:
            return None
        return PolicyDriftError(
            f"the divergence from the reference has been above max_kl={self._max_kl} for {PATIENCE} steps in "
            f"a row, at step {record['step']} it is {found:.4f}: take a larger kl_coef or a smaller learning "
            "rate, and go on from an earlier training state, or give a larger max_kl"
        )


def check_max_kl(max_kl: float | None, kl_coef: float) -> None:
    """Check the limit of the divergence.

    Raises:
        ValueError: `max_kl` is not above 0, or is given and `kl_coef` is 0.
    """
    if max_kl is None:
        return
    if not max_kl > 0:
        raise ValueError(f"max_kl={max_kl}: give a number above 0, or leave it out")
    if kl_coef == 0.0:
        raise ValueError(
            f"max_kl={max_kl} and kl_coef=0: it limits the divergence from a reference, and there is one "
            "with a kl_coef above 0 only; a small one is enough"
        )


def check_samples(every: int | None, folder: str | Path | None) -> None:
    """Check the options of samples.

    Raises:
        ValueError: `every` is below 1, or is given without a `folder`.
    """
    if every is not None and (type(every) is not int or every < 1):
        raise ValueError(f"samples_every={every!r}: give an integer of at least 1")
    if every is not None and folder is None:
        raise ValueError(f"samples_every={every} without a folder: give log=... too")


class AnswerSample(NamedTuple):
    """Sampled answers to a prompt.

    Attributes:
        prompt: The text of the prompt.
        answers: The texts of the answers.
        rewards: Their rewards.
    """

    prompt: str
    answers: list[str]
    rewards: list[float]


class SampleLog:
    """Log of prompts with their answers and rewards, every few steps, in `samples.jsonl`.

    Args:
        folder: Folder of the file; None for no log.
        every: Interval in steps; None for no log.
        first: Number of steps before this run.
        writes: Whether this rank writes.
    """

    def __init__(self, folder: str | Path | None, *, every: int | None, first: int, writes: bool) -> None:
        self._every, self._file = every, None
        if every is not None and folder is not None and writes:
            self._file = StepLines(Path(folder, "samples.jsonl"), first=first)

    def add(self, samples: Callable[[], Sequence[AnswerSample]], *, done: int, steps: int) -> None:
        """Write samples if they are due.

        Args:
            samples: Returns the samples.
            done: Number of completed steps.
            steps: Number of steps on these answers.
        """
        if self._file is None or self._every is None or (done + steps) // self._every == done // self._every:
            return
        for each in samples():
            self._file.add({"step": done + 1, **each._asdict()})
