"""Profilers of a training loop: torch's, with a trace for each rank, and bytes sent between ranks.

with profile("traces", schedule=torch.profiler.schedule(wait=1, warmup=1, active=3)) as profiler:
    for batch in loader:
        ...
        profiler.step()
"""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch.profiler

from colossalai.communication import Ledger, ledger
from colossalai.context import global_context

_MIB = 2**20


def profile(folder: str | Path | None = None, **options: Any) -> torch.profiler.profile:
    """Return torch's profiler; every rank writes a trace of its own.

    Args:
        folder: Destination of the traces when a measurement is complete, as `rank_<rank>_step_<step>.json`,
            which chrome://tracing and Perfetto open; None for none.
        options: Arguments of `torch.profiler.profile`: schedule, activities, profile_memory, ...

    Raises:
        ValueError: Both a folder and `on_trace_ready` are given.
    """
    if folder is None:
        return torch.profiler.profile(**options)
    if "on_trace_ready" in options:
        raise ValueError(
            "profile is given a folder and on_trace_ready, which both place the traces: give one"
        )
    target = Path(folder)

    def write(profiler: torch.profiler.profile) -> None:
        target.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(target / f"rank_{_rank()}_step_{profiler.step_num}.json"))

    return torch.profiler.profile(on_trace_ready=write, **options)


class CommProfiler:
    """Counts the bytes sent by the collectives of `colossalai.communication`, and the time in them.

    Tensor and sequence parallelism use these; communication of DDP and FSDP is shown by torch's profiler. An
    accelerator is synchronized before and after each of them.
    """

    def __init__(self) -> None:
        self._book = Ledger(timed=True)
        self._open = ExitStack()

    @property
    def ledger(self) -> Ledger:
        """All operations so far."""
        return self._book

    def enable(self) -> None:
        """Begin to count."""
        self.disable()
        self._book = self._open.enter_context(ledger(timed=True))

    def disable(self) -> None:
        """Stop counting; counts are kept until `enable`."""
        self._open.close()

    def result(self) -> str:
        """Return a table with a line for each operation and axis."""
        kinds = dict.fromkeys((entry.op, entry.axis) for entry in self._book.entries)
        rows = [
            f"{op:<16}{axis:<12}{self._book.count(op, axis):>8}{self._book.num_bytes(op, axis) / _MIB:>12.3f}"
            f"{1e3 * self._book.seconds(op, axis):>12.3f}"
            for op, axis in kinds
        ]
        return "\n".join([f"{'operation':<16}{'axis':<12}{'number':>8}{'MiB':>12}{'ms':>12}", *rows])

    def show(self) -> None:
        """Print the table."""
        print(self.result(), flush=True)  # noqa: T201 - that is what it is for

    def to_file(self, folder: str | Path) -> None:
        """Write the table to `communication_rank_<rank>.txt` in a folder."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        (path / f"communication_rank_{_rank()}.txt").write_text(self.result() + "\n")


class ProfilerContext:
    """Several profilers that run together within a `with` block.

    Args:
        profilers: Such as `[CommProfiler()]`.
        enable: Whether they run; False costs nothing.
    """

    def __init__(self, profilers: Iterable[CommProfiler] = (), enable: bool = True) -> None:
        self.profilers = list(profilers)
        self.is_enabled = enable

    def add_profiler(self, profiler: CommProfiler) -> None:
        """Take one more."""
        self.profilers.append(profiler)

    def __enter__(self) -> Self:
        for profiler in self.profilers if self.is_enabled else ():
            profiler.enable()
        return self

    def __exit__(self, *error: object) -> None:
        for profiler in self.profilers:
            profiler.disable()

    def show(self) -> None:
        """Print the results of each profiler."""
        for profiler in self.profilers:
            profiler.show()

    def to_file(self, folder: str | Path) -> None:
        """Write the results of each profiler to a folder."""
        for profiler in self.profilers:
            profiler.to_file(folder)


def _rank() -> int:
    return global_context.get_global_rank() if global_context.is_launched else 0
