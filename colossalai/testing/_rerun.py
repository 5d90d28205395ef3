"""Run a function again when it fails for a reason not its own, such as a port that was taken meanwhile."""

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from colossalai.logging import get_dist_logger

P = ParamSpec("P")
R = TypeVar("R")

# As gloo, the store, the socket module and `colossalai.launch` say it; the exceptions of ranks carry their
# text.
_ADDRESS_IN_USE = r"EADDRINUSE|[Aa]ddress already in use|port \d+ is held by"


def rerun_on_exception(
    exception_type: type[Exception] = Exception, pattern: str | None = None, max_try: int | None = 5
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run the decorated function again when it raises a certain exception.

    Args:
        exception_type: Exceptions of this type lead to another try; all others pass through.
        pattern: If given, only those whose text contains this regular expression.
        max_try: How often the function runs at most; None for as often as it takes. The last exception passes
            through.

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
    """Run the decorated function again, and so with another free port, when its port was taken meanwhile.

    Args:
        max_try: How often the function runs at most; None for as often as it takes.
    """
    return rerun_on_exception(Exception, _ADDRESS_IN_USE, max_try)
