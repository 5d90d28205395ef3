"""Worker: the process of one rank, and its setup before the user's script.

    python _worker.py LAUNCHER_PID CPUS (script | module) TARGET ARGS...

It is started by its path and imports nothing but the standard library, so the script finds the interpreter
as `python TARGET ARGS...` leaves it: torch not imported yet, its own `sys.argv` and `sys.path[0]`. Three
things are added: the process dies with its launcher; it runs on the CPUs assigned by the launcher, and
keeps the memory that it frees; and an uncaught error is written to a file, named in
TORCHELASTIC_ERROR_FILE, which the launcher shows, instead of the screen, where the ranks' errors would mix.
"""

import builtins
import ctypes
import faulthandler
import importlib.machinery
import io
import json
import os
import pkgutil
import runpy
import signal
import sys
import time
import traceback
import types
from collections.abc import Mapping
from types import TracebackType

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_TRIM_BYTES, _MMAP_BYTES = (1 << 31) - 1, 1 << 30
_MALLOC_VARIABLES = frozenset(
    (
        "MALLOC_TRIM_THRESHOLD_",
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_MMAP_MAX_",
        "MALLOC_TOP_PAD_",
        "GLIBC_TUNABLES",
    )
)
_NOT_THE_USERS = (__file__, runpy.__file__, "<frozen runpy>")  # Python forgets __file__ when the script ends


def main() -> None:
    """Prepare the process, then be the user's script."""
    launcher_pid, cpus, kind, target, *args = sys.argv[1:]
    die_with(int(launcher_pid))
    bind_to(cpus)  # before there is a second thread: threads and child processes inherit it
    keep_freed_memory(os.environ)
    # A crash in compiled code shows where Python was, in the thread that crashed and in no other: those run
    # on while their stacks would be read. That could crash in turn, and SIGSEGV would hide gloo's SIGABRT.
    faulthandler.enable(all_threads=False)
    hook = sys.excepthook = WorkerErrorHook(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Whole lines, at once: the ranks' lines do not mix in a pipe, and a killed rank's output is complete.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    sys.argv = [target, *args]
    try:
        if kind == "module":
            _put_first_on_path(os.getcwd())
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        elif pkgutil.get_importer(target) is None:
            _put_first_on_path(os.path.dirname(os.path.realpath(target)))
            _run_file(os.path.abspath(target))
        else:  # a folder or an archive with a __main__.py, which runpy itself puts on the path
            _put_first_on_path(None)
            runpy.run_path(os.path.abspath(target), run_name="__main__")
    except SystemExit as error:
        hook.record_exit(error)
        raise


class WorkerErrorHook:
    """A `sys.excepthook` that writes the error to a file, in the format of torch's elastic launcher.

    Args:
        error_file: The file; without one, errors are printed as always.
    """

    def __init__(self, error_file: str) -> None:
        self.error_file = error_file
        self.pid = os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Write the error, or print it where that is not possible."""
        if issubclass(kind, KeyboardInterrupt):
            return  # caused by the user, and every rank would print it
        text = "".join(traceback.format_exception(kind, error, _frames_of_the_user(trace)))
        exception = traceback.TracebackException(kind, error, None)
        exception.__notes__ = None  # they follow the message, and the text has them
        *_, message = exception.format_exception_only()
        # A child that the script forked has inherited this hook; it is not the rank.
        if not (
            self.error_file and self.pid == os.getpid() and self._write(message.strip(), text, exit_code=1)
        ):
            sys.stderr.write(text)

    def record_exit(self, error: SystemExit) -> None:
        """Record the time of a `sys.exit` with an error, by which the launcher finds the first failure."""
        exit_code = error.code if isinstance(error.code, int) else int(error.code is not None)
        # An error recorded by the script itself is more detailed.
        if self.error_file and exit_code != 0 and not os.path.exists(self.error_file):
            self._write(f"sys.exit({error.code!r})", "", exit_code=exit_code)

    def _write(self, message: str, text: str, *, exit_code: int) -> bool:
        """Return whether it could be written."""
        try:
            write_error(self.error_file, message, text, exit_code=exit_code)
        except OSError:
            return False  # the caller prints it instead
        return True


def write_error(path: str, message: str, text: str, *, exit_code: int, is_refusal: bool = False) -> None:
    """Write an error to a file, in the format of torch's elastic launcher; `_failure.read_error` reads it.

    Args:
        path: The file; no reader ever finds a part of it.
        message: One line.
        text: The traceback.
        exit_code: The exit code of this process.
        is_refusal: Whether the message alone is for the user.
    """
    now = time.time()
    extra = {"py_callstack": text, "timestamp": str(int(now)), "time": now, "exit_code": exit_code}
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump({"message": {"message": message, "extraInfo": {**extra, "is_refusal": is_refusal}}}, file)
    os.replace(file.name, path)


def die_with(launcher_pid: int) -> None:
    """Have the kernel kill this process when the launcher ends for any reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:  # it ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def bind_to(cpus: str) -> None:
    """Let this process run on its CPUs only.

    Args:
        cpus: Those of all ranks of this machine by local rank, as "0,1;2,3"; "-" binds none.
    """
    if cpus == "-":
        return
    own = cpus.split(";")[int(os.environ["LOCAL_RANK"])]
    try:
        os.sched_setaffinity(0, [int(cpu) for cpu in own.split(",")])
    except OSError as error:  # a sandbox, or a CPU that went offline; the rank works without, if slower
        sys.stderr.write(f"colossalai run: rank {os.environ['RANK']} is not bound to CPUs {own}: {error}\n")


def keep_freed_memory(environment: Mapping[str, str]) -> bool:
    """Let glibc keep freed memory for the next step, and return whether it does.

    By default it returns blocks of 32 MiB and more to the system as soon as they are free: the logits of a
    language model in every step, whose pages the kernel then clears and maps again one by one. Blocks of
    1 GiB and more still go back at once, and 2 GiB of free memory at the end of the heap.
    Settings of the user take precedence.
    """
    if not _MALLOC_VARIABLES.isdisjoint(environment):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not everywhere: musl has none
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))


def _run_file(path: str) -> None:
    """Run a source file as Python does; `runpy.run_path` would make `__file__` and `sys.argv[0]` the same."""
    main_module = types.ModuleType("__main__")
    main_module.__file__ = path
    main_module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main_module.__dict__.update(__builtins__=builtins, __cached__=None, __annotations__={})
    sys.modules["__main__"] = main_module
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    exec(code, main_module.__dict__)


def _put_first_on_path(folder: str | None) -> None:
    """Replace the folder of this file, which Python has put first on `sys.path`, by the script's."""
    if not sys.flags.safe_path:
        sys.path[:1] = [] if folder is None else [folder]


def _frames_of_the_user(trace: TracebackType | None) -> TracebackType | None:
    """Skip the frames that lead from here to the script."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _NOT_THE_USERS:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
