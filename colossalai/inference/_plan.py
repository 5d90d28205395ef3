"""Draws and scored positions at the end of a step, chunk by chunk."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from colossalai.inference._answers import OpenAnswer
from colossalai.inference._executor import StepOrder
from colossalai.inference.paging import StepArrays
from colossalai.inference.sampling import Draw, Draws
from colossalai.inference.scheduling import BatchStep, RunningSequence, SequenceChunk

Answers = Mapping[RunningSequence, OpenAnswer]


@dataclass(frozen=True)
class PlannedStep:
    """A step, its order for the executor, and the layout of its result.

    Attributes:
        step: The step.
        order: Order for the executor.
        num_draws: Number of draws of each chunk.
        scored: Scored prompt positions of each chunk.
    """

    step: BatchStep
    order: StepOrder
    num_draws: Sequence[int]
    scored: Sequence[Sequence[int]]


def plan_step(step: BatchStep, answers: Answers, adapter_numbers: Mapping[str, int]) -> PlannedStep:
    """Plan the draws and scored positions at the end of a step.

    Args:
        step: The step.
        answers: Answer of each sequence.
        adapter_numbers: Numbers of the adapters on all ranks.
    """
    draws: list[Draw] = []
    rows: list[int] = []  # rows of the step whose logits are needed
    draw_rows: list[int] = []
    scored_rows: list[int] = []
    scored: list[Sequence[int]] = []
    first = 0
    num_draws = []
    for chunk in step.chunks:
        answer = answers[chunk.sequence]
        num_before = len(draws)
        last = first + len(chunk.token_ids) - 1 - chunk.num_drafted
        positions = _to_score(chunk, answer)
        scored.append(positions)
        for position in positions:
            scored_rows.append(len(rows))
            rows.append(first + position - chunk.start)
        if chunk.num_draws:
            drafted = chunk.token_ids[len(chunk.token_ids) - chunk.num_drafted :]
            for row in range(last, last + 1 + len(drafted)):
                if not rows or rows[-1] != row:
                    rows.append(row)
                draw_rows += [len(rows) - 1] * chunk.num_draws
            draws += _draws(chunk, drafted, answer)
        num_draws.append(len(draws) - num_before)
        first += len(chunk.token_ids)
    order = StepOrder(
        StepArrays.of(step, rows, adapter_numbers),
        Draws.of(draws),
        np.array(draw_rows, np.int64),
        *_scores(step, scored, scored_rows),
    )
    return PlannedStep(step, order, num_draws, scored)


def _to_score(chunk: SequenceChunk, answer: OpenAnswer) -> Sequence[int]:
    """Return the positions of a chunk whose next token is a prompt token to score."""
    sequence, wanted = chunk.sequence, answer.of.prompt_logprobs
    if wanted is None or sequence.index:
        return ()
    end = min(chunk.start + len(chunk.token_ids), sequence.num_prompt - 1)
    return [position for position in range(chunk.start, end) if position not in wanted]


def _scores(
    step: BatchStep, scored: Sequence[Sequence[int]], rows: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids = [
        chunk.sequence.tokens[position + 1]
        for chunk, positions in zip(step.chunks, scored, strict=True)
        for position in positions
    ]
    top = [
        chunk.sequence.request.params.prompt_logprobs
        for chunk, positions in zip(step.chunks, scored, strict=True)
        for _ in positions
    ]
    return np.array(rows, np.int64), np.array(ids, np.int64), np.array(top, np.int64)


def _draws(chunk: SequenceChunk, drafted: Sequence[int], answer: OpenAnswer) -> list[Draw]:
    """Return the draws of a chunk: one per answer at the end of a prompt, else one per position."""
    try:
        draws = answer.draws(drafted)
        for index in range(1, chunk.num_draws):
            draws += answer.draws_of_twin(index)
    except Exception as error:  # raised by a grammar: fails only its own request, after the step
        answer.of.failure = error
        answer.matcher = None
        draws = answer.draws(drafted) * max(chunk.num_draws, 1)
    return draws
