"""Executors: where the steps of an engine are computed, in this process or on other ranks."""

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from colossalai.inference.loading import ServedWeights, WeightSource
from colossalai.inference.paging import Runner, StepArrays
from colossalai.inference.sampling import Drawn, Draws, draw_tokens, logprobs_of


@dataclass(frozen=True)
class StepOrder:
    """A step, and what is drawn and scored at its end.

    Attributes:
        arrays: The step.
        draws: How tokens are drawn.
        draw_rows: (draws,) for each the row of the logits.
        scored_rows: (scored,) rows of the logits whose next token is known: those of a prompt.
        scored_ids: (scored,) these tokens.
        scored_top: (scored,) how many log-probabilities are wanted beside.
    """

    arrays: StepArrays
    draws: Draws
    draw_rows: np.ndarray
    scored_rows: np.ndarray
    scored_ids: np.ndarray
    scored_top: np.ndarray


@dataclass(frozen=True)
class StepResult:
    """What a step has drawn, and what it has scored."""

    drawn: Drawn
    scored: Drawn


class Executor(ABC):
    """Computes steps, in the order in which they are submitted."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """Number of steps that can be under way at a time."""

    @abstractmethod
    def submit(self, order: StepOrder) -> None:
        """Begin a step."""

    @abstractmethod
    def collect(self) -> StepResult:
        """Return the result of the oldest step that is under way; waits for it."""

    @abstractmethod
    def discard(self) -> None:
        """Forget steps that are under way: nobody will collect their results."""

    @abstractmethod
    def weights_stamp(self) -> int:
        """Return a number that changes when values of the model are changed in place."""

    @property
    @abstractmethod
    def is_torn(self) -> bool:
        """Whether an update of weights has failed on the way: some are new, others old."""

    @abstractmethod
    def update_weights(self, source: WeightSource) -> None:
        """Replace all values of the model; no step is under way. See `ServedWeights.load`."""

    @abstractmethod
    def keep_alive(self) -> None:
        """Let other ranks know that the engine is there; no step is under way."""

    @abstractmethod
    def close(self) -> None:
        """End what the executor has started."""


class LocalExecutor(Executor):
    """Computes in this process.

    Args:
        runner: The model.
        weights: Its values.
    """

    def __init__(self, runner: Runner, weights: ServedWeights) -> None:
        self.runner = runner
        self._weights = weights
        self._results: deque[StepResult] = deque()

    @property
    def depth(self) -> int:
        """One: a step is computed when it is submitted."""
        return 1

    def submit(self, order: StepOrder) -> None:
        """Compute a step."""
        self._results.append(finish_step(self.runner.run(order.arrays), order))

    def collect(self) -> StepResult:
        """Return the result of the oldest step."""
        return self._results.popleft()

    def discard(self) -> None:
        """Forget a result that nobody has collected."""
        self._results.clear()

    def weights_stamp(self) -> int:
        """Return that of the model."""
        return self.runner.weights_stamp()

    @property
    def is_torn(self) -> bool:
        """Whether values of the model are partly new."""
        return self._weights.is_torn

    def update_weights(self, source: WeightSource) -> None:
        """Replace all values of the model."""
        self._weights.load(source)

    def keep_alive(self) -> None:
        """Do nothing: there is nobody else."""

    def close(self) -> None:
        """Do nothing: there is nothing else."""


@torch.inference_mode()
def finish_step(logits: torch.Tensor, order: StepOrder) -> StepResult:
    """Draw and score tokens.

    Args:
        logits: (rows, vocabulary) of the step.
        order: What is drawn from which rows.
    """
    scored = logprobs_of(_pick(logits, order.scored_rows), order.scored_ids, order.scored_top)
    return StepResult(draw_tokens(_pick(logits, order.draw_rows), order.draws), scored)


def _pick(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    if len(rows) == len(logits) and np.array_equal(rows, np.arange(len(rows))):
        return logits
    return logits.index_select(0, torch.from_numpy(rows.copy()).to(logits.device))
