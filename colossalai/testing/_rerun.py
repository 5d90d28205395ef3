"""Decorators that rerun a function after an unrelated failure, such as a port that is in use."""

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from colossalai.logging import get_dist_logger

P = ParamSpec("P")
R = TypeVar("R")

# Messages of gloo, the store, the socket module and `colossalai.launch`; exceptions of ranks contain them.
_ADDRESS_IN_USE = r"EADDRINUSE|[Aa]ddress already in use|port \d+ is held by"


def rerun_on_exception(
    exception_type: type[Exception] = Exception, pattern: str | None = None, max_try: int | None = 5
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run the decorated function again when it raises a certain exception.

    Args:
        exception_type: Type of the exceptions that lead to another try; all others are raised.
        pattern: Regular expression that the text of the exception must contain. Default: any text.
        max_try: Maximum number of tries; None for no limit. The last exception is raised.

    Raises:
        ValueError: `max_try` is not at least 1, or `exception_type` is not an exception type.
    """
    if not (isinstance(exception_type, type) and issubclass(exception_type, BaseException)):
        raise ValueError(
            f"exception_type is {exception_type!r}; give a type of exceptions, such as RuntimeError"
        )
    if max_try is not None and max_try < 1:
        raise ValueError(f"max_try is {max_try}; it must be at least 1, or None for no limit")

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            tries = 1
            while True:
                try:
                    return function(*args, **kwargs)
                except exception_type as error:
                    is_wanted = pattern is None or re.search(pattern, str(error))
                    if not is_wanted or tries == max_try:
                        raise
                    get_dist_logger().warning(
                        f"{function.__name__} runs again after try {tries}: {type(error).__name__}: {error}"
                    )
                tries += 1

        return run

    return decorate


def rerun_if_address_is_in_use(max_try: int | None = 5) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run the decorated function again, which then uses another free port, if its port is in use.

    Args:
        max_try: Maximum number of tries; None for no limit.
    """
    return rerun_on_exception(Exception, _ADDRESS_IN_USE, max_try)
