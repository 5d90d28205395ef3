"""`parameterize`: run a test for several values of an argument, inside one process (or one set of ranks)."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def parameterize(argument: str, values: Iterable[Any]) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Call the decorated function once for every value of one argument.

    Unlike `pytest.mark.parametrize`, it works inside a function that `spawn` runs, where starting the ranks
    costs more than the test. Stacked decorators run all combinations. An exception gets a note with the
    value.

    Args:
        argument: Name of a parameter of the function.
        values: The values, in order.

    Raises:
        ValueError: The function has no parameter `argument`.
    """
    values = list(values)

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(function)
        _check(argument, function, signature)

        @functools.wraps(function)
        def run_all(*args: Any, **kwargs: Any) -> None:
            for value in values:
                try:
                    function(*args, **kwargs, **{argument: value})
                except BaseException as error:
                    error.add_note(f"with {argument}={value!r}")
                    raise

        # Signature for pytest and further decorators, which must not pass this argument.
        rest = [parameter for name, parameter in signature.parameters.items() if name != argument]
        run_all.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return run_all

    return decorate


def _check(argument: str, function: Callable[..., Any], signature: inspect.Signature) -> None:
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    if argument not in signature.parameters and not takes_any:
        raise ValueError(
            f"parameterize({argument!r}): {function.__name__} has no such parameter; "
            f"it has {list(signature.parameters)}"
        )
