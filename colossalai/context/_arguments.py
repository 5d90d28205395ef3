"""Misspelt arguments of a door: the error says which name was meant, and which there are."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from colossalai.context._check import nearest

P = ParamSpec("P")
R = TypeVar("R")


class UnknownArgumentError(TypeError, ValueError):
    """A keyword argument that a function does not have.

    A TypeError as Python raises it, and a ValueError as every mistake at a door is one.
    """


def names_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function say of keyword arguments that it does not have which are meant, and which it has.

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
