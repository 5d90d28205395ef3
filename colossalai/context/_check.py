"""Checks of single config values; an error names the key, the value and the allowed values."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from colossalai.context._config import ConfigException, nearest


def check_mapping(value: Any, key: str, *, example: str) -> None:
    """Require a dict."""
    if not isinstance(value, Mapping):
        raise ConfigException(f"{key} is {value!r}; it must be a dict, such as {example}")


def check_keys(value: Mapping[str, Any], known: Sequence[str], key: str) -> None:
    """Require that every key is known; the error suggests the nearest known one."""
    for name in value:
        if name not in known:
            raise ConfigException(
                f"{key} has no key {name!r}{_suggestion(name, known)}; its keys are {list(known)}"
            )


def check_positive(value: Any, key: str) -> int:
    """Require an integer of at least 1 and return it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigException(f"{key} is {_format_value(value)}; it must be an integer of at least 1")
    return value


def check_number(value: Any, key: str, *, least: float, positive: bool = False) -> float:
    """Require a finite number of at least `least` (above it with `positive`) and return it."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_number = (
        is_number and -sys.float_info.max <= value <= sys.float_info.max
    )  # neither inf, nan nor a huge int
    if not is_number or value < least or (positive and value == least):
        bound = f"above {least:g}" if positive else f"of at least {least:g}"
        raise ConfigException(f"{key} is {_format_value(value)}; it must be a number {bound}")
    return float(value)


def check_bool(value: Any, key: str) -> None:
    """Require True or False."""
    if not isinstance(value, bool):
        raise ConfigException(f"{key} is {value!r}; it must be True or False")


def _suggestion(name: Any, known: Iterable[str]) -> str:
    match = nearest(name, known)
    return f": did you mean {match!r}?" if match else ""


def _format_value(value: Any) -> str:
    """Return a value for a message; Python refuses to print integers with thousands of digits."""
    is_huge = isinstance(value, int) and value.bit_length() > 128
    return f"an integer of {value.bit_length()} bits" if is_huge else repr(value)


P = ParamSpec("P")
R = TypeVar("R")


class UnknownArgumentError(TypeError, ValueError):
    """A keyword argument that a function does not have.

    A TypeError as raised by Python, and a ValueError like every mistake of a user.
    """


def names_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that an unknown keyword argument raises an error with the known ones.

    Args:
        function: A function or method without `**kwargs`.
    """
    known = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not parameter.POSITIONAL_ONLY and parameter.name != "self"
    ]
    allowed = frozenset(known)
    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for given in kwargs.keys() - allowed:
            match = nearest(given, known)
            meant = f": did you mean {match!r}?" if match is not None else ";"
            raise UnknownArgumentError(f"{name} has no argument {given!r}{meant} it has {', '.join(known)}")
        return function(*args, **kwargs)

    return checked
