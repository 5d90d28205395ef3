"""Rank report: the waits of a rank, its calls and its stacks; made at a request of a watchdog.

[Note: the module of a backward]
In a backward no module is on the stack, and recording it in each forward would cost every collective a walk
over its callers. The graph contains it: it leads from the roots of the backward, which are still in a frame
of the waiting thread or of the thread that waits for it, to the hanging node. The reported module holds the
parameters of that node, or the nearest ones of the consumers of its result in the forward. An autograd
function can also record it itself, with `current_module`.

[Note: blocking waits]
A collective that is not complete need not block: it can run in parallel to the script. A script is blocked if
its thread is inside of the wait for a work, of a call through shared memory, or of a meeting. A meeting or a
message can be identified; otherwise it is one of the incomplete collectives. The thread counts only if it is
in the same frame before and after all of that is read. The rank's progress is read later still, so it made no
further progress before it was blocked. `deadlock` relies on that.
"""

import dataclasses
import json
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from colossalai.monitor._calls import AxisOf, CallRecord, describe_group
from colossalai.monitor._flight_recorder import awaited_meetings, collectives, group_members
from colossalai.monitor._last_calls import MessageRecord
from colossalai.monitor._sections import (
    PACKAGE_FOLDER,
    TORCH_FOLDER,
    innermost_sections,
    meetings_reached,
    name_of,
    outwards,
    owner_of,
    place_of,
)

_OUR_THREADS = "colossalai-"  # prefix of their names: these threads are not hanging
_MOST_NODES = 200_000  # searched nodes of an autograd graph
_NEAR = 2  # steps between a node and the parameters of its module
_NUM_RECENT = 8  # collectives of each group in a report
_BLOCKING_CALLS = f"{PACKAGE_FOLDER}/communication/shared_memory/"

# Subject of code by its location, searched from the innermost frame of a stack outwards.
_SUBJECTS = (
    (f"{TORCH_FOLDER}/utils/data/", "data loading"),
    (f"{PACKAGE_FOLDER}/runtime/_data.py", "data loading"),
    (f"{PACKAGE_FOLDER}/checkpoint_io/", "saving or loading a checkpoint"),
    (f"{TORCH_FOLDER}/serialization.py", "saving or loading a checkpoint"),
    (f"{TORCH_FOLDER}/autograd/", "the backward"),
    (f"{TORCH_FOLDER}/optim/", "the optimizer step"),
)


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Activity of a rank, as its watchdog reports it.

    Attributes:
        rank: Its global rank.
        host: The name of its machine.
        pid: Its process.
        activity: The words after "rank 3"; also for a waiting rank.
        waiting: Its incomplete calls: meetings, then the rest, oldest first.
        held: Those of them that block its script; none while the script runs.
        in_backward: While its script is in a backward: collectives that it issued and that are not complete.
        reached: Its progress in every channel.
        met: By channel, the last meeting that it has come to.
        recent: For every group its last collectives.
        stacks: The Python stacks of its threads.
        overdue: The sections that it has been in for longer than allowed.
        gone: Ranks of the same machine whose processes have ended or are stopped, and how.
        signatures: By rank, the last collectives of this one and of those that are gone.
    """

    rank: int
    host: str
    pid: int
    activity: str
    waiting: tuple[CallRecord, ...] = ()
    held: tuple[CallRecord, ...] = ()
    in_backward: tuple[CallRecord, ...] = ()
    reached: dict[str, int] = dataclasses.field(default_factory=dict)
    met: dict[str, str] = dataclasses.field(default_factory=dict)
    recent: dict[str, list[CallRecord]] = dataclasses.field(default_factory=dict)
    stacks: str = ""
    overdue: str = ""
    gone: dict[int, str] = dataclasses.field(default_factory=dict)
    signatures: dict[int, list[CallRecord]] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """Return it as text for the store."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> "RankReport":
        """Return the report of a `to_json` text."""
        fields = json.loads(text)
        for name in ("waiting", "held", "in_backward"):
            fields[name] = tuple(map(CallRecord.from_plain, fields[name]))
        for name, key in (("recent", str), ("signatures", int)):
            fields[name] = {
                key(owner): list(map(CallRecord.from_plain, calls)) for owner, calls in fields[name].items()
            }
        fields["gone"] = {int(rank): how for rank, how in fields["gone"].items()}
        return RankReport(**fields)


def report_of_this_rank(
    *,
    rank: int,
    host: str,
    pid: int,
    record: MessageRecord,
    axis_of: AxisOf,
    since: float,
    overdue: str,
    gone: dict[int, str],
    signatures: dict[int, list[CallRecord]],
) -> RankReport:
    """Look at this process from a thread of its own.

    Args:
        rank: The global rank.
        host: The name of the machine.
        pid: The process.
        record: The messages.
        axis_of: Returns the name of the mesh axis along some ranks.
        since: Seconds since the epoch, when the job began.
        overdue: The wait or section that has lasted too long.
        gone: Ranks of this machine whose processes have ended or are stopped, and how.
        signatures: By rank, the last collectives of this one and of those that are gone.
    """
    frames = _frames()  # first; see [Note: blocking waits]
    issued = collectives(since=since)
    pending = [item for item in issued if item.is_pending]
    messages, awaited = record.messages(), awaited_meetings()
    members = group_members()

    def describe(items: list[CallRecord]) -> tuple[CallRecord, ...]:
        return tuple(_located(item, frames.get(item.thread), axis_of, members) for item in items)

    held = describe(_blocking_calls(frames, record, awaited=awaited, messages=messages, pending=pending))
    in_backward = describe(_pending_in_backward(frames, pending))
    waiting = describe([*awaited, *pending, *messages])
    met = meetings_reached()
    reached = {**record.counts, **{channel: item.number for channel, item in met.items()}}
    recent: dict[str, list[CallRecord]] = {}
    for item in issued:
        reached[item.channel] = max(reached.get(item.channel, 0), item.number)
        recent.setdefault(item.channel, []).append(item)
    main = threading.main_thread().ident or 0
    return RankReport(
        rank=rank,
        host=host,
        pid=pid,
        activity=_activity(main, frames.get(main)) + _waits_of_others(main),
        waiting=waiting,
        held=held,
        in_backward=in_backward,
        reached=reached,
        met={channel: item.describe() for channel, item in met.items()},
        recent={group: calls[-_NUM_RECENT:] for group, calls in recent.items()},
        stacks="\n".join(_stacks(frames)),
        overdue=overdue,
        gone=gone,
        signatures=signatures,
    )


def _frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread that is not ours."""
    ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith(_OUR_THREADS)}
    return {thread: frame for thread, frame in sys._current_frames().items() if thread not in ours}


def _blocking_calls(
    frames: dict[int, FrameType],
    record: MessageRecord,
    *,
    awaited: list[CallRecord],
    messages: list[CallRecord],
    pending: list[CallRecord],
) -> list[CallRecord]:
    """Return the calls that block the script; nothing if it runs.

    See [Note: blocking waits].

    Args:
        frames: Frames of the threads before the other values were read.
        record: The messages.
        awaited: The meetings in which a thread waits.
        messages: The messages that a thread waits for.
        pending: The collectives that are not complete.
    """
    main = threading.main_thread().ident or 0
    innermost = frames.get(main)
    if innermost is None:
        return []
    in_waits = record.waiting_threads() | {
        thread for thread, frame in frames.items() if frame.f_code.co_filename.startswith(_BLOCKING_CALLS)
    }
    in_waits.update(item.thread for item in awaited)
    thread = main
    if innermost.f_code.co_name == "_engine_run_backward":  # on a device, a thread of the engine waits
        thread = next((other for other in frames if other in in_waits), main)
    if thread not in in_waits or _frames().get(thread) is not frames[thread]:
        return []
    return (
        [item for item in awaited if item.thread == thread]
        or [item for item in messages if item.thread == thread]
        or pending
    )


def _pending_in_backward(frames: dict[int, FrameType], pending: list[CallRecord]) -> list[CallRecord]:
    """Return the collectives of a backward that is in progress; it may be computing or wait for them."""
    main = threading.main_thread().ident or 0
    innermost = frames.get(main)
    if innermost is None or innermost.f_code.co_name != "_engine_run_backward":
        return []
    if _frames().get(main) is not innermost:
        return []
    # Issued by the script's thread or by one of autograd's, which no frame of Python's belongs to.
    return [item for item in pending if item.thread == main or item.thread not in frames]


def _located(
    item: CallRecord, frame: FrameType | None, axis_of: AxisOf, members: dict[str, tuple[int, ...]]
) -> CallRecord:
    """Return a call with the name of its group or meeting, and its module, from the frame of its thread."""
    inside = _is_communicating(frame)
    axis = axis_of(members.get(item.group, item.partners))
    return dataclasses.replace(
        item,
        op=(_op_on(frame) or item.op) if inside and item.op not in ("send", "recv") else item.op,
        where=item.where or describe_group(axis, item.group),
        module=_current_module(frame) if inside else None,
    )


def _activity(thread: int, frame: FrameType | None) -> str:
    """Describe the activity of a thread."""
    names = [section.name for section in innermost_sections() if section.thread == thread]
    place = place_of(frame)
    subject = _subject(frame) or next(iter(names), "")
    text = f"it is in {subject}: {place}" if subject else f"it is at {place or 'a place without Python'}"
    error = sys._current_exceptions().get(thread)
    value = error if isinstance(error, BaseException) else (error[1] if error else None)
    if isinstance(value, BaseException):
        text += f"; it is handling {type(value).__name__}: {value}{_raised_at(value)}"
    return text


def _waits_of_others(main: int) -> str:
    """Describe waits of other threads than the main one outside of the job."""
    now = time.monotonic()
    return "".join(
        f"; another thread is in {section.name}, where nothing has moved for {now - section.start:.0f} s"
        for section in innermost_sections()
        if section.is_wait and section.thread != main
    )


def _raised_at(error: BaseException) -> str:
    steps = list(traceback.extract_tb(error.__traceback__))
    return f" (raised at {Path(steps[-1].filename).name}:{steps[-1].lineno})" if steps else ""


def _subject(frame: FrameType | None) -> str | None:
    for inner in outwards(frame):
        for beginning, subject in _SUBJECTS:
            if inner.f_code.co_filename.startswith(beginning):
                return subject
    return None


def _is_communicating(frame: FrameType | None) -> bool:
    """Whether a thread is, as far as Python sees, inside of torch or of our collectives."""
    return frame is not None and frame.f_code.co_filename.startswith((TORCH_FOLDER, PACKAGE_FOLDER))


def _op_on(frame: FrameType | None) -> str | None:
    """Return the collective that a thread is in, by the name that its caller used."""
    found = None
    for inner in outwards(frame):
        if not inner.f_code.co_filename.startswith(f"{TORCH_FOLDER}/distributed/"):
            break
        if inner.f_code.co_filename.endswith("distributed_c10d.py"):
            found = inner.f_code.co_name
    return found


def _current_module(frame: FrameType | None) -> str | None:
    """Return the name of the innermost module in whose forward or backward a thread is."""
    node = next((node for inner in outwards(frame) if (node := _node_of(inner)) is not None), None)
    noted = getattr(node, "module", None)
    if isinstance(noted, weakref.ref) and (module := noted()) is not None:
        return name_of(module, module)
    if node is not None and (name := _owner_in_graph(node)) is not None:
        return name
    modules = [module for inner in outwards(frame) if (module := _module_of(inner)) is not None]
    return name_of(modules[0], modules[-1]) if modules else None


def _module_of(frame: FrameType) -> nn.Module | None:
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    first = frame.f_locals.get("self") if names[:1] == ("self",) else None  # others are about a module
    return first if isinstance(first, nn.Module) else None


def _node_of(frame: FrameType) -> Any:
    """Return the node of the autograd graph whose backward a frame is, None for any other frame."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    first = frame.f_locals.get(names[0]) if frame.f_code.co_name == "backward" and names else None
    return first if hasattr(first, "next_functions") else None


def _owner_in_graph(node: Any) -> str | None:
    """Return the name of the module of a node whose backward runs; see [Note: the module of a backward]."""
    used_by: dict[Any, Any] = {}
    waiting = deque(_roots_of_backwards())
    while waiting and len(used_by) < _MOST_NODES:
        user = waiting.popleft()
        for part, _ in user.next_functions:
            if part is not None and part not in used_by:
                used_by[part] = user
                waiting.append(part)
    below: Any = None
    for depth in (
        1,
        *[_NEAR] * _NEAR,
    ):  # the parameters of the node itself, then of the consumers of its result
        if node is None:
            return None
        for param in _parameters_near(node, below, depth):
            if (name := owner_of(param)) is not None:
                return name
        node, below = used_by.get(node), node
    return None


def _parameters_near(node: Any, below: Any, depth: int) -> Iterator[torch.Tensor]:
    for part, _ in node.next_functions if depth else ():
        if hasattr(part, "variable"):
            yield part.variable
        elif part is not None and part is not below:
            yield from _parameters_near(part, below, depth - 1)


def _roots_of_backwards() -> Iterator[Any]:
    """Yield the roots of running backwards; the engine can run them in other threads."""
    for innermost in sys._current_frames().values():
        for frame in outwards(innermost):
            if frame.f_code.co_name == "_engine_run_backward":
                for output in frame.f_locals.get("t_outputs", ()):
                    root = getattr(output, "grad_fn", None) or getattr(output, "node", None)
                    if root is not None:
                        yield root


def _stacks(frames: dict[int, FrameType]) -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    for thread, frame in sorted(frames.items(), key=lambda item: item[0] != main):
        yield f"thread {names.get(thread, thread)}, the innermost call last:"
        yield "".join(traceback.format_stack(frame)).rstrip()
