"""Sections of a training script, module names and code lines: the activity of a rank in words.

Entering a section is two list operations, so sections can be entered in every step. Names of modules are
looked
up only for a report: a hook on every module would cost time in every call.
"""

import itertools
import linecache
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn

TORCH_FOLDER = str(Path(torch.__file__).parent)
PACKAGE_FOLDER = str(Path(__file__).parents[1])
_STANDARD = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")
_LIBRARIES = (*_STANDARD, TORCH_FOLDER, PACKAGE_FOLDER)
_NUM_FRAMES = 12  # between an autograd function and the module that uses it


class OpenSection(NamedTuple):
    """A section that some thread is in.

    Attributes:
        name: Its name.
        thread: The identifier of the thread.
        start: Time of its entry or of the last `still_moving`, by `time.monotonic`.
        is_wait: Whether it counts as a wait.
    """

    name: str
    thread: int
    start: float
    is_wait: bool


@dataclass(frozen=True)
class _Registry:
    """Sections and meetings of the threads of this process; the registry of the package.

    Attributes:
        sections: By thread, the sections that it is in, the innermost last.
        meetings: By thread, the meeting that it waits in.
        expected: By thread, the number of `expected_wait` contexts that it is in.
        reached: By channel, the last meeting that a thread has come to.
        models: Those whose modules have names.
    """

    sections: dict[int, list[OpenSection]] = field(default_factory=dict)
    meetings: dict[int, "meeting"] = field(default_factory=dict)
    expected: dict[int, int] = field(default_factory=dict)
    reached: dict[str, "meeting"] = field(default_factory=dict)
    models: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)


_registry = _Registry()


class section:
    """A context, which may be used often and nested: until it ends, this thread is in `name`.

    Args:
        name: The words after "it is in".
        is_wait: Whether it counts as a wait, also if steps are not watched: for an external resource, such
            as a file server. Call `still_moving` when it makes progress.
    """

    def __init__(self, name: str, *, is_wait: bool = False) -> None:
        self._name = name
        self._is_wait = is_wait

    def __enter__(self) -> None:
        thread = threading.get_ident()
        entry = OpenSection(self._name, thread, time.monotonic(), self._is_wait)
        _registry.sections.setdefault(thread, []).append(entry)

    def __exit__(self, *error: object) -> None:
        thread = threading.get_ident()
        sections = _registry.sections[thread]
        sections.pop()
        if not sections:  # threads come and go
            del _registry.sections[thread]


class meeting(section):
    """A section in which this thread waits for other ranks by other means than one collective.

    Args:
        name: The activity that it belongs to.
        channel: Name of a sequence of meetings, in the same order on all ranks.
        number: Its number in the sequence; it grows.
        partners: The global ranks that meet.
        op: Name of one meeting.
        patience: Seconds after which the reports of all ranks are requested, repeatedly. It is an error if
            the missing ranks cannot arrive any more; None: only the watchdog's timeout ends the wait.
        advice: A sentence for that error.
        after_backwards: Whether it is between steps: a backward ends, with all its collectives, before.
    """

    def __init__(
        self,
        name: str,
        *,
        channel: str,
        number: int,
        partners: Sequence[int],
        op: str = "step",
        patience: float | None = None,
        advice: str = "",
        after_backwards: bool = False,
    ) -> None:
        super().__init__(name if op == "step" else f"a {op}")
        self.name, self.channel, self.number, self.partners = name, channel, number, tuple(partners)
        self.op, self.patience, self.advice = op, patience, advice
        self.after_backwards = after_backwards
        self.start = time.monotonic()

    def describe(self) -> str:
        """Name it: "gather #3 of chunk 1"."""
        return f"{self.op} #{self.number} of {self.name}"

    def mark_reached(self) -> None:
        """Note that this rank has come: the others do not wait for it any more, even if it goes on."""
        _registry.reached[self.channel] = self

    def __enter__(self) -> None:
        super().__enter__()
        self.start = time.monotonic()
        self.mark_reached()
        _registry.meetings[threading.get_ident()] = self

    def __exit__(self, *error: object) -> None:
        del _registry.meetings[threading.get_ident()]
        super().__exit__(*error)


@contextmanager
def expected_wait() -> Iterator[None]:
    """Mark a long wait for other ranks as intended: it causes no notice, and is reported when overdue."""
    thread = threading.get_ident()
    _registry.expected[thread] = _registry.expected.get(thread, 0) + 1
    try:
        yield
    finally:
        _registry.expected[thread] -= 1
        if not _registry.expected[thread]:
            del _registry.expected[thread]


def is_wait_expected() -> bool:
    """Return whether a thread of this rank is in an `expected_wait`."""
    return bool(_registry.expected)


def still_moving() -> None:
    """Restart the time of this thread's section, if it counts as a wait."""
    sections = _registry.sections.get(threading.get_ident())
    if sections and sections[-1].is_wait:
        sections[-1] = sections[-1]._replace(start=time.monotonic())


def current_meeting() -> meeting | None:
    """Return the meeting that the calling thread waits in."""
    return _registry.meetings.get(threading.get_ident())


def meetings() -> dict[int, meeting]:
    """Return the meetings that this rank waits in, by thread."""
    return dict(_registry.meetings)


def clear_meetings() -> None:
    """Forget how far this rank has come, in a job before this one: channels begin anew."""
    _registry.reached.clear()


def meetings_reached() -> dict[str, meeting]:
    """Return the last meetings that this rank has come to, by channel."""
    return dict(_registry.reached)


def innermost_sections() -> list[OpenSection]:
    """Return the innermost section of every thread that is in one."""
    # A slice, since another thread can leave its section meanwhile.
    return [section for sections in list(_registry.sections.values()) for section in sections[-1:]]


def current_module() -> weakref.ref[nn.Module] | None:
    """Return the innermost module in whose forward the caller, the forward of an autograd function, is.

    Kept as `ctx.module` it has the backward named where the graph does not tell: see [Note: the module of a
    backward]. It looks at up to 12 frames (2 to 8 us); nothing of this package calls it.
    """
    for frame in itertools.islice(outwards(sys._getframe(2)), _NUM_FRAMES):
        code = frame.f_code
        if code.co_name == "forward" and code.co_varnames[:1] == ("self",):
            module = frame.f_locals.get("self")
            return weakref.ref(module) if isinstance(module, nn.Module) else None
    return None


def name_modules(model: nn.Module) -> None:
    """Have the modules of a model called by their names in it."""
    _registry.models.add(model)


def name_of(module: nn.Module, outermost: nn.Module) -> str:
    """Return the name of a module in the model that it is part of.

    Args:
        module: The module.
        outermost: The model, if none is known that holds it.
    """
    for model in [*_registry.models, outermost]:
        for name, part in model.named_modules():
            if part is module:
                return name or type(model).__name__
    return type(module).__name__


def owner_of(param: torch.Tensor) -> str | None:
    """Return the name of the module that holds a parameter, None if no model that is known has it."""
    for model in list(_registry.models):
        for name, held in model.named_parameters(remove_duplicate=False):
            if held is param:
                return name.rpartition(".")[0] or type(model).__name__
    return None


def place_of(frame: FrameType | None) -> str:
    """Return the innermost line of the user's own code in a stack: 'train.py:41 in step: `loss = ...`'."""
    for inner in outwards(frame):
        code = inner.f_code
        if not code.co_filename.startswith(_LIBRARIES):
            line = linecache.getline(code.co_filename, inner.f_lineno).strip()
            shown = f": `{line}`" if line else ""
            return f"{Path(code.co_filename).name}:{inner.f_lineno} in {code.co_name}{shown}"
    return ""


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Go from the innermost frame of a stack to the outermost."""
    while frame is not None:
        yield frame
        frame = frame.f_back
