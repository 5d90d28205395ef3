"""What a rank is doing, in words: sections of code that say what they are, and the names of modules.

Entering a section is two list operations, so the sections stand where training goes by all the time. Names of
modules are looked up only when somebody asks: a hook on every module would be paid for on every call.
"""

import sys
import threading
import time
import weakref
from dataclasses import dataclass

from torch import nn

_NUM_FRAMES = 12  # between an autograd function and the module that uses it


class section:
    """A context, which may be used often and nested: until it ends, this thread is in `name`.

    Args:
        name: What follows the words "it is in".
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        _of_threads.setdefault(threading.get_ident(), []).append((self._name, time.monotonic()))

    def __exit__(self, *error: object) -> None:
        thread = threading.get_ident()
        sections = _of_threads[thread]
        sections.pop()
        if not sections:  # threads come and go
            del _of_threads[thread]


@dataclass(frozen=True)
class Section:
    """A section that some thread is in.

    Attributes:
        name: What it is.
        thread: The identifier of the thread.
        start: When it was entered, by `time.monotonic`.
    """

    name: str
    thread: int
    start: float


def innermost_sections() -> list[Section]:
    """Return the innermost section of every thread that is in one."""
    found = []
    for thread, sections in list(_of_threads.items()):
        for name, start in sections[-1:]:
            found.append(Section(name, thread, start))
    return found


def module_at_work() -> weakref.ref[nn.Module] | None:
    """Return the innermost module in whose forward the caller is.

    For autograd functions: in their backward no module is on the stack any more. A few frames up, no more.
    """
    frame = sys._getframe(2)
    for _ in range(_NUM_FRAMES):
        code = frame.f_code
        if code.co_name == "forward" and code.co_varnames[:1] == ("self",):
            module = frame.f_locals.get("self")
            return weakref.ref(module) if isinstance(module, nn.Module) else None
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def name_modules(model: nn.Module) -> None:
    """Have the modules of a model called by their names in it."""
    _models.add(model)


def name_of(module: nn.Module, outermost: nn.Module) -> str:
    """Return the name of a module in the model that it is part of.

    Args:
        module: The module.
        outermost: The model, if none is known that holds it.
    """
    for model in [*_models, outermost]:
        for name, part in model.named_modules():
            if part is module:
                return name or type(model).__name__
    return type(module).__name__


_of_threads: dict[int, list[tuple[str, float]]] = {}
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
