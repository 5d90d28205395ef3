"""What is told of a run that learns from rewards beside its records: samples, warnings, and why it ends.

All ranks see the same records, so whatever is decided by them alone is decided on all ranks alike.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from colossalai.chat._records import Record, StepLines
from colossalai.logging import get_dist_logger

LARGEST_GAP = "logprob_gap_largest"
"""The largest |log p(engine) - log p(trainer)| of a token, of all ranks."""
KL_NAME = "kl_to_reference"
PATIENCE = 10
"""Steps in a row with too large a divergence that end a run."""
_WIDE_GAP = 0.02  # what two roundings to bfloat16 on the way to a log-probability come to


class PolicyDriftError(RuntimeError):
    """A model has gone too far from its reference; raised on all ranks, after its state was saved."""


class Gap(NamedTuple):
    """Where engine and trainer differ most in a batch.

    Attributes:
        size: By how much, a tensor that nobody has waited for.
        place: In the flattened batch, (batch * (length - 1),).
        input_ids: The batch, (batch, length).
        loss_mask: The tokens of answers, (batch, length).
        engine: Log-probabilities of the engine, (batch, length - 1).
        trainer: Those of the trainer.
    """

    size: Tensor
    place: Tensor
    input_ids: Tensor
    loss_mask: Tensor
    engine: Tensor
    trainer: Tensor

    def told(self, tokenizer: Any) -> str:
        """Return it in words."""
        row, column = divmod(int(self.place), self.engine.shape[1])
        ids, is_answer = self.input_ids[row].tolist(), self.loss_mask[row].tolist()
        begin, token = is_answer.index(True), ids[column + 1]
        return (
            f"token {token} ({tokenizer.decode([token])!r}), number {column + 1 - begin} of an answer to "
            f"{tokenizer.decode(ids[:begin])!r}, has log-probability {float(self.engine[row, column]):.4f} "
            f"from the engine and {float(self.trainer[row, column]):.4f} from the trainer"
        )


class RewardWatch:
    """Looks at each record of a run: warns once of what is odd, and ends a run that drifts away.

    Args:
        tokenizer: That of the model.
        max_kl: Largest mean divergence from the reference, by k3; None: any.
    """

    def __init__(self, tokenizer: Any, *, max_kl: float | None) -> None:
        self._tokenizer, self._max_kl = tokenizer, max_kl
        self._num_above = 0
        self._gaps: list[Gap] = []
        self._told: set[str] = set()

    def note(self, gap: Gap) -> None:
        """Keep where this rank's engine and trainer differ, until the step has ended."""
        self._gaps.append(gap)

    def __call__(self, record: Record) -> Exception | None:
        """Return what is to end the run, if anything is."""
        gaps, self._gaps = self._gaps, []
        largest = record.get(LARGEST_GAP, 0.0)
        # A NaN is warned of as well.
        if not largest <= _WIDE_GAP and self._is_new(LARGEST_GAP):
            own = max(gaps, key=lambda each: float(each.size), default=None)
            if own is not None and not float(own.size) < largest:  # the rank that has it speaks
                get_dist_logger().warning(
                    f"step {record['step']}: log-probabilities of engine and trainer differ by "
                    f"{largest:.4f}, more than {_WIDE_GAP}: {own.told(self._tokenizer)}. Answers are learned "
                    "as if the trainer had drawn them; compute both in the same precision, and train "
                    "without dropout, which the engine has not"
                )
        if record.get("groups_alike", 0.0) == 1.0 and self._is_new("groups_alike"):
            get_dist_logger().warning(
                f"step {record['step']}: in each group all rewards are equal, so nothing is learned from "
                "them; give easier or harder prompts, or a reward that tells answers apart",
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
        if found is None:  # a step of PPO without an answer that counts
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
    """Refuse a limit that nothing is held to.

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
            "with a kl_coef above 0 only; a small one will do"
        )


def check_samples(every: int | None, folder: str | Path | None) -> None:
    """Refuse samples that cannot be written.

    Raises:
        ValueError: `every` is below 1, or is given without a `folder`.
    """
    if every is not None and (type(every) is not int or every < 1):
        raise ValueError(f"samples_every={every!r}: give an integer of at least 1")
    if every is not None and folder is None:
        raise ValueError(f"samples_every={every} without a folder: give log=... too")


class AnswerSample(NamedTuple):
    """Answers to a prompt that are written down.

    Attributes:
        prompt: The text of the prompt.
        answers: The texts of the answers.
        rewards: Their rewards.
    """

    prompt: str
    answers: list[str]
    rewards: list[float]


class SampleLog:
    """Prompts with their answers and rewards, of every few steps, in `samples.jsonl`.

    Args:
        folder: Where that is; None: nowhere.
        every: Of how many steps one is written down; None: of none.
        first: Steps that were done before.
        writes: Whether this rank does so.
    """

    def __init__(self, folder: str | Path | None, *, every: int | None, first: int, writes: bool) -> None:
        self._every, self._file = every, None
        if every is not None and folder is not None and writes:
            self._file = StepLines(Path(folder, "samples.jsonl"), first=first)

    def add(self, samples: Callable[[], Sequence[AnswerSample]], *, done: int, steps: int) -> None:
        """Write samples down if their turn has come.

        Args:
            samples: Returns them.
            done: Steps that were done before.
            steps: How many steps are made of these answers.
        """
        if self._file is None or self._every is None or (done + steps) // self._every == done // self._every:
            return
        for each in samples():
            self._file.add({"step": done + 1, **each._asdict()})
