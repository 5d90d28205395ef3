"""Chunks train as one process does, through both doors, on models of the zoo and of transformers."""

from functools import partial
from typing import Any

import pytest
from torch import nn

from colossalai.testing import ParityCase, Subject
from tests.parity import training
from tests.parity.training import check_runs, grouped_runs
from tests.zero.gemini.table import GEMINI, OF_TRANSFORMERS, in_chunks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(("num_ranks", "runs"), grouped_runs(GEMINI))
def test_chunks_are_one_process(num_ranks: int, runs: list[Any]) -> None:
    check_runs(num_ranks, runs)


@pytest.mark.parametrize(("num_ranks", "runs"), grouped_runs(OF_TRANSFORMERS))
def test_models_of_transformers_in_chunks_are_one_process(num_ranks: int, runs: list[Any]) -> None:
    pytest.importorskip("transformers")
    check_runs(num_ranks, runs)


subject_of = partial(training.subject_of, None)


def through_booster(
    case: ParityCase, options: dict[str, Any], accumulation: int, model: nn.Module
) -> Subject:
    """Train a case of other rooms in chunks, at the plugin door."""
    task = training.Task(
        build=case.build_model,
        batches=lambda: case.batches,
        criterion=None,
        loss=case.compute_loss,
        optimizer=case.build_optimizer,
    )
    run = in_chunks(task, 1, accumulation, case.max_norm, **options)
    return training.through_booster(run, run.plugin(), model)
