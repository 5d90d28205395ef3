"""Notebook launcher: ranks that are started from a cell of a notebook, or from a running Python.

[Note: fork or spawn]
The definitions of a cell exist in a copy of this process only, so ranks are forked if that is safe. It is not
safe once this process has used an accelerator, whose driver does not survive a fork, and outside Linux. Then
they are new interpreters, which have to import the function. A forked rank computes with one thread: a thread
pool of torch in this process is not in the copy, and a wait for it would never end.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from colossalai.cluster import LOOPBACK, free_port
from colossalai.launcher._failure import signal_name
from colossalai.launcher._processes import GRACE_S, end_processes
from colossalai.launcher._worker import die_with

_REPORTS_S = 0.2  # time for the errors of ranks that fail with the first one
_REPORT_CHARS = 30_000  # of a traceback; a pipe takes more without a reader


def notebook_launcher(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    *,
    start_method: str | None = None,
) -> None:
    """Call `fn(*args)` on several ranks of this machine, from a notebook or any running Python, and wait.

    `fn` launches the job itself, with `colossalai.launch_from_torch()`, and then builds its model.
    Ctrl-C, or the interruption of the cell, ends all ranks and their child processes.

    Args:
        fn: The function. In a notebook it can be defined in a cell.
        args: Its arguments.
        num_processes: Number of ranks; one for each accelerator, or one, if not given. One runs in this
            process.
        start_method: "fork" or "spawn"; fork where that is safe if not given. Forked ranks compute with one
            thread each. Spawned ones are new interpreters: the function is imported there, so it is one of a
            module, or of a script that calls this under `if __name__ == "__main__":`.

    Raises:
        ValueError: An argument has a wrong type or value, this process is part of a job already, or the ranks
            cannot be forked and cannot import `fn`.
        torch.multiprocessing.ProcessRaisedException: A rank raised (the message has its traceback); the
            others have been ended.
        torch.multiprocessing.ProcessExitedException: A rank was killed, or left with an exit code.
    """
    _check(fn, args, num_processes, start_method)
    num_processes = num_processes or _num_devices() or 1
    environment = {
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(free_port()),
    }
    if num_processes == 1:
        with _in_environment({**environment, "RANK": "0", "LOCAL_RANK": "0"}):
            fn(*args)
        return
    method = start_method or _start_method(fn)
    context: Any = multiprocessing.get_context(method)
    ranks: list[BaseProcess] = []
    reports: list[connection.Connection] = []
    try:
        for rank in range(num_processes):
            report, writer = context.Pipe(duplex=False)
            reports.append(report)
            variables = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(
                context.Process(target=_run_rank, args=(writer, os.getpid(), variables, method, fn, args))
            )
            _start(ranks[-1], fn)
            writer.close()
        _wait(ranks, reports)
    finally:
        _end([rank for rank in ranks if rank.pid is not None])
        for report in reports:
            report.close()


def _run_rank(
    writer: connection.Connection,
    parent_pid: int,
    variables: dict[str, str],
    method: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    """Run the function on a rank, and report the time and text of its failure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that a user interrupts ends the ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        die_with(parent_pid)
    os.environ.update(variables)
    import torch

    if method == "fork":  # see [Note: fork or spawn]
        torch.set_num_threads(1)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // int(variables["WORLD_SIZE"])))
    try:
        fn(*args)
        _end_job()
    except Exception:
        writer.send_bytes(f"{time.time()} {traceback.format_exc()[-_REPORT_CHARS:]}".encode())
        sys.exit(1)


def _end_job() -> None:
    """End the job that the function has launched, if it has not; a save in the background is waited for."""
    from colossalai.context import global_context

    if global_context.is_launched:
        global_context.destroy()


def _start(rank: BaseProcess, fn: Callable[..., Any]) -> None:
    try:
        rank.start()
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise ValueError(
            f"{fn!r} and its arguments cannot be sent to new interpreters ({error}): take a function at the "
            "top level of a module, and arguments that can be pickled"
        ) from error


def _wait(ranks: Sequence[BaseProcess], reports: Sequence[connection.Connection]) -> None:
    """Wait until all ranks have ended well, or one has not."""
    running = {rank.sentinel: rank for rank in ranks}
    while running:
        for sentinel in connection.wait([*running]):
            rank = running.pop(sentinel)  # type: ignore[arg-type]
            rank.join()
            if rank.exitcode != 0:
                time.sleep(_REPORTS_S)
                raise _failure(ranks, reports)


def _failure(ranks: Sequence[BaseProcess], reports: Sequence[connection.Connection]) -> Exception:
    """Return the error of the rank that failed first; the others lost it then, and failed for that."""
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

    raised: list[tuple[float, int, str]] = []
    for number, (rank, report) in enumerate(zip(ranks, reports, strict=True)):
        text = _read(report)
        if text:
            moment, _, trace = text.partition(" ")
            raised.append((float(moment), number, trace))
        elif not rank.is_alive() and rank.exitcode:
            name = signal_name(-rank.exitcode) if rank.exitcode < 0 else None
            how = f"exit code {rank.exitcode}" if name is None else f"signal {name.removeprefix('signal ')}"
            return ProcessExitedException(
                f"rank {number} ended with {how}",
                error_index=number,
                error_pid=rank.pid or 0,
                exit_code=rank.exitcode,
                signal_name=name,
            )
    _, number, trace = min(raised)
    return ProcessRaisedException(f"\n\n-- rank {number} raised:\n{trace}", number, ranks[number].pid or 0)


def _read(report: connection.Connection) -> str:
    try:
        return report.recv_bytes().decode() if report.poll() else ""
    except EOFError:  # the rank has ended without a report
        return ""


def _end(ranks: Sequence[BaseProcess]) -> None:
    """End running ranks and their child processes: SIGTERM first, then SIGKILL."""
    known = {*_trees(ranks)}
    end_processes(lambda: [*known.union(_trees(ranks))], signal.SIGTERM, grace_s=GRACE_S)
    for rank in ranks:
        rank.join()


def _trees(ranks: Sequence[BaseProcess]) -> list[psutil.Process]:
    found = []
    for rank in ranks:
        try:
            process = psutil.Process(rank.pid)
            found += [process, *process.children(recursive=True)] if rank.is_alive() else []
        except psutil.NoSuchProcess:
            continue
    return found


def _start_method(fn: Callable[..., Any]) -> str:
    """Return how ranks are started; see [Note: fork or spawn]."""
    import torch

    device = torch.accelerator.current_accelerator()  # that of torch's build, without a call of the driver
    if sys.platform != "linux":
        reason = "a process of this system cannot be forked safely"
    elif device is not None and torch.get_device_module(device).is_initialized():
        reason = f"this process has used the {device.type} device, which does not survive a fork"
    else:
        return "fork"
    file = getattr(sys.modules["__main__"], "__file__", None)
    if fn.__module__ == "__main__" and not os.path.isfile(file or ""):
        raise ValueError(
            f"{reason}, and new interpreters cannot find {fn.__name__}, which is of this notebook: restart "
            "the kernel and call notebook_launcher before anything uses the device, or put the function into "
            "a module"
        )
    return "spawn"


def _num_devices() -> int:
    import torch

    device = torch.accelerator.current_accelerator()
    return 0 if device is None else torch.get_device_module(device).device_count()


@contextmanager
def _in_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Within the block, this process is a rank; afterwards it is in no job and has its variables back."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        _end_job()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _check(
    fn: Callable[..., Any], args: Sequence[Any], num_processes: int | None, start_method: str | None
) -> None:
    from torch import distributed as dist

    from colossalai.context import global_context

    if not callable(fn):
        raise ValueError(f"fn is {fn!r}; it must be a function, which is called as fn(*args)")
    if not isinstance(args, list | tuple):
        raise ValueError(f"args is {args!r}; it must be a tuple, such as (3,) for one argument")
    if num_processes is not None and (type(num_processes) is not int or num_processes < 1):
        raise ValueError(f"num_processes is {num_processes!r}; it must be an integer of at least 1")
    if start_method not in (None, "fork", "spawn"):
        raise ValueError(f"start_method is {start_method!r}; it must be 'fork' or 'spawn'")
    if global_context.is_launched or dist.is_initialized():
        raise ValueError(
            "this process has launched a job already: call notebook_launcher instead of launch, or first "
            "colossalai.core.global_context.destroy()"
        )
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            f"this process is rank {os.environ.get('RANK')} of {os.environ['WORLD_SIZE']} already: a script "
            "that a launcher starts calls its function itself"
        )
