"""The random states in a training state: a small file for each rank."""

from pathlib import Path
from typing import Any

from colossalai.checkpoint_io._agreement import gather, global_rank, num_ranks
from colossalai.checkpoint_io._lr_scheduler import read_plain
from colossalai.checkpoint_io._manifest import Manifest
from colossalai.checkpoint_io._tree import plain
from colossalai.context import fitting_random_state, is_of_this_place, random_state, say_other_layout


def random_files() -> dict[str, Any]:
    """Return the random states of all ranks, by the name of the file that each goes to; collective."""
    states = gather(plain(random_state(), at="random state"))
    return {_file_name(rank, len(states)): state for rank, state in enumerate(states)}


def read_random_state(folder: Path, manifest: Manifest) -> tuple[dict[str, Any], str]:
    """Return the random state with which this rank goes on, and what that means if the layout is another one.

    Raises:
        ValueError: A file is damaged.
        OSError: It cannot be read.
    """
    count = manifest.num_ranks
    if count == num_ranks():
        own = read_plain(folder / _file_name(global_rank(), count))
        if is_of_this_place(own):
            return fitting_random_state([own], step=manifest.step), ""
    saved = [read_plain(folder / _file_name(rank, count)) for rank in range(count)]
    return fitting_random_state(saved, step=manifest.step), say_other_layout(saved, step=manifest.step)


def _file_name(rank: int, count: int) -> str:
    return f"random/{rank:05d}-of-{count:05d}.pt"
