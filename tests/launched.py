"""Tests whose body runs on ranks, in a job that has been launched."""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest

import colossalai
from tests.ranks import run_ranks


def on_ranks(num_ranks: int, config: Mapping[str, Any] | None = None) -> Callable[..., Callable[..., None]]:
    """Return a decorator of a test that is to run on each of several ranks.

    What fixtures and `parametrize` give the test is sent to the ranks. They end with the test, and so nothing
    has to be destroyed.

    Args:
        num_ranks: How many ranks there are.
        config: That of the job. Default: an empty one.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.dist
        @functools.wraps(body)
        def test(**given: Any) -> None:
            run_ranks(_run_body, num_ranks, body.__module__, body.__name__, dict(config or {}), given)

        return test

    return decorate


def _run_body(module: str, name: str, config: dict[str, Any], given: dict[str, Any]) -> None:
    test = getattr(importlib.import_module(module), name)
    colossalai.launch_from_torch(config, verbose=False)
    test.__wrapped__(**given)
