"""Executors: run the steps of an engine, in this process or on other ranks."""

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
    """A step with its draws and scored tokens.

    Attributes:
        arrays: The step.
        draws: Parameters of the draws.
        draw_rows: (draws,) row of the logits of each draw.
        scored_rows: (scored,) rows of the logits whose next token is given, as in a prompt.
        scored_ids: (scored,) these tokens.
        scored_top: (scored,) number of alternatives to report for each.
    """

    arrays: StepArrays
    draws: Draws
    draw_rows: np.ndarray
    scored_rows: np.ndarray
    scored_ids: np.ndarray
    scored_top: np.ndarray


@dataclass(frozen=True)
class StepResult:
    """Drawn tokens and scored tokens of a step."""

    drawn: Drawn
    scored: Drawn


class Executor(ABC):
    """Abstract: runs steps in the order of submission."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """Maximum number of steps in flight."""

    @abstractmethod
    def submit(self, order: StepOrder) -> None:
        """Begin a step."""

    @abstractmethod
    def collect(self) -> StepResult:
        """Wait for the oldest step in flight, and return its result."""

    @abstractmethod
    def discard(self) -> None:
        """Drop the steps in flight; their results are never collected."""

    @abstractmethod
    def weights_stamp(self) -> int:
        """Return a number that changes with every in-place change of the model's values."""

    @property
    @abstractmethod
    def is_partly_updated(self) -> bool:
        """Whether an update of weights has failed midway, with some values new and others old."""

    @abstractmethod
    def update_weights(self, source: WeightSource) -> None:
        """Replace all values of the model; no step may be in flight. See `ServedWeights.load`."""

    @abstractmethod
    def keep_alive(self) -> None:
        """Send a heartbeat to the other ranks; no step may be in flight."""

    @abstractmethod
    def close(self) -> None:
        """End the other ranks."""


class LocalExecutor(Executor):
    """Runs steps in this process.

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
        """1: a step is computed at its submission."""
        return 1

    def submit(self, order: StepOrder) -> None:
        """Compute a step."""
        self._results.append(finish_step(self.runner.run(order.arrays), order))

    def collect(self) -> StepResult:
        """Return the result of the oldest step."""
        return self._results.popleft()

    def discard(self) -> None:
        """Drop uncollected results."""
        self._results.clear()

    def weights_stamp(self) -> int:
        """Return the stamp of the model."""
        return self.runner.weights_stamp()

    @property
    def is_partly_updated(self) -> bool:
        """Whether values of the model are partly new."""
        return self._weights.is_partly_updated

    def update_weights(self, source: WeightSource) -> None:
        """Replace all values of the model."""
        self._weights.load(source)

    def keep_alive(self) -> None:
        """Do nothing: there are no other ranks."""

    def close(self) -> None:
        """Do nothing: there are no other ranks."""


@torch.inference_mode()
def finish_step(logits: torch.Tensor, order: StepOrder) -> StepResult:
    """Draw and score tokens.

    Args:
        logits: (rows, vocabulary) of the step.
        order: Rows and parameters of the draws.
    """
    scored = logprobs_of(_pick(logits, order.scored_rows), order.scored_ids, order.scored_top)
    return StepResult(draw_tokens(_pick(logits, order.draw_rows), order.draws), scored)


def _pick(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    if len(rows) == len(logits) and np.array_equal(rows, np.arange(len(rows))):
        return logits
    return logits.index_select(0, torch.from_numpy(rows.copy()).to(logits.device))
