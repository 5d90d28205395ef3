"""The state of a learning-rate scheduler in one torch file; the same serves any small plain state."""

from pathlib import Path
from typing import Any, Protocol

from colossalai.checkpoint_io._collective import on_every_rank
from colossalai.checkpoint_io.formats._single import read_torch, verify, write_torch
from colossalai.checkpoint_io.resharding import plain
from colossalai.checkpoint_io.storage import atomic_file, staged


class Stateful(Protocol):
    """An object that hands out and takes back its state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: plain values and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Go back to a state."""
        ...


def save_lr_scheduler(lr_scheduler: Stateful, checkpoint: str | Path) -> None:
    """Save a learning-rate scheduler in a file; collective: every rank calls it, global rank 0 writes.

    Raises:
        ValueError: Its state holds something that is not plain.
        OSError: The file cannot be written; on all ranks. What was there before is still there.
    """
    state = plain(lr_scheduler.state_dict(), at="lr_scheduler")
    with staged(atomic_file, checkpoint) as write:
        write(lambda path: write_torch(path, state))


def load_lr_scheduler(lr_scheduler: Stateful, checkpoint: str | Path) -> None:
    """Load a learning-rate scheduler from a file that `save_lr_scheduler` wrote; collective.

    Raises:
        ValueError: The file is damaged or holds something else.
        OSError: It cannot be read.
    """
    lr_scheduler.load_state_dict(on_every_rank(lambda: read_plain(Path(checkpoint))))


def read_plain(path: Path, *, mapped: bool = False, allow_pickle: bool = False) -> dict[str, Any]:
    """Read a torch file of a dictionary of plain values, its checksums compared.

    Args:
        path: The file.
        mapped: Leave the tensors in it views of the file.
        allow_pickle: Run the code that it may hold, if it cannot be restored without.

    Raises:
        ValueError: It is damaged, or holds something else.
    """
    verify(path)
    content = read_torch(path, mapped=mapped, allow_pickle=allow_pickle)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__} where a dict is expected")
    return content
