"""Decorators for the requirements of a test: devices, an environment variable, free memory."""

import functools
import gc
import os
import unittest
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def skip_if_not_enough_gpus(min_gpus: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Skip the decorated test if there are fewer accelerators.

    Args:
        min_gpus: Required number of accelerators; they are counted when the test runs.

    Raises:
        ValueError: `min_gpus` is not a whole number.
    """
    if type(min_gpus) is not int or min_gpus < 0:
        raise ValueError(f"min_gpus is {min_gpus!r}; it must be a number of accelerators")

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            found = torch.accelerator.device_count()
            if found < min_gpus:
                raise unittest.SkipTest(f"it needs {min_gpus} accelerators, and there are {found}")
            return function(*args, **kwargs)

        return run

    return decorate


def run_on_environment_flag(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Skip the decorated test unless an environment variable is set to a value other than 0 and "".

    Args:
        name: Name of the variable, such as "LONG_TESTS".

    Raises:
        ValueError: `name` is empty or not a string.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"the name of the variable is {name!r}; write @run_on_environment_flag('LONG_TESTS')"
        )

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if os.environ.get(name, "0") in ("0", ""):
                raise unittest.SkipTest(f"it runs with {name}=1")
            return function(*args, **kwargs)

        return run

    return decorate


def clear_cache_before_run() -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Collect garbage, free cached memory of the accelerator and reset its peaks before the test."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            gc.collect()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
                torch.accelerator.empty_cache()
                torch.accelerator.reset_peak_memory_stats()
            return function(*args, **kwargs)

        return run

    return decorate
