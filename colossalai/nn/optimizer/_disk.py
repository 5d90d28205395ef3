"""Optimizer states in files: while one block of them is updated, the next is read and the last is written.

[Note: states on disk]
Each key of the states ("exp_avg", ...) has a file, in which every parameter has a region that begins at a
page. A *block* is a run of at most `buffer_size` bytes at the same place in the files of all keys; it holds
many small parameters or a piece of a large one. A buffer takes a block through read, update and write; then
the next one. Blocks are updated as they come from the disk, in any order: a slow read holds up its buffer and
not the others.

`optimizer.state` holds tensors that are mappings of the files: reading them (`state_dict`, a checkpoint)
reads the disk. A state that is any other tensor (loaded from a checkpoint) is *in memory*, takes precedence,
and goes to disk with its block. So a block that cannot be written is not lost: its states become such
tensors.
"""

import mmap
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colossalai.logging import get_dist_logger
from colossalai.nn.optimizer._adam_kernel import flat, local
from colossalai.nn.optimizer._disk_file import PAGE, PrivateFolder, StateFile
from colossalai.nn.optimizer._disk_layout import (
    KEYS,
    MASTER,
    DiskBlock,
    DiskPiece,
    cut_into_blocks,
    is_able,
    kind_of,
    regions_of,
    shaped_as,
)

States = Mapping[Tensor, dict[str, Any]]


@dataclass(frozen=True)
class DiskOptions:
    """Options of reading and writing states.

    Args:
        depth: Buffers, each with its thread: one is updated while the others are read and written.
        buffer_size: Bytes of a buffer for each kind of state.
        direct: Whether to go past the page cache (`O_DIRECT`) where the file system can. Without it reads and
            writes are as fast as memory as long as the machine has memory to spare.

    Raises:
        ValueError: `depth` is below 1, or `buffer_size` is not a positive multiple of `PAGE`.
    """

    depth: int = 3
    buffer_size: int = 4 * 2**20
    direct: bool = True

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ValueError(
                f"depth={self.depth} is out of range; give 1 or more, 3 to read, update and write"
            )
        if self.buffer_size < PAGE or self.buffer_size % PAGE:
            raise ValueError(f"buffer_size={self.buffer_size} must be a positive multiple of {PAGE}")


@dataclass(eq=False)
class _Buffer:
    """Memory for one block, aligned to pages."""

    memory: mmap.mmap
    size: int
    block: DiskBlock | None = None  # the block in it

    def part(self, number: int, num_bytes: int) -> memoryview:
        return memoryview(self.memory)[number * self.size : number * self.size + num_bytes]

    def states_of(self, piece: DiskPiece, block: DiskBlock) -> dict[str, Tensor]:
        numel = piece.stop - piece.start
        return {
            key: torch.frombuffer(
                self.memory, dtype=block.dtype, count=numel, offset=number * self.size + piece.offset
            )
            for number, key in enumerate(block.files)
        }

    def exchange(self, following: DiskBlock | None, *, read: bool) -> tuple["_Buffer", DiskBlock | None]:
        """Write the content of the buffer, then read the following block into it; return both."""
        if self.block is not None:
            for number, file in enumerate(self.block.files.values()):
                file.write(self.part(number, self.block.num_bytes), self.block.offset)
            self.block = None
        if following is not None and read:
            for number, file in enumerate(following.files.values()):
                file.read(self.part(number, following.num_bytes), following.offset)
        return self, following


@dataclass
class _Pass:
    """The progress of one iteration over blocks."""

    buffers: list[_Buffer]
    visited: set[DiskBlock] = field(default_factory=set)


class DiskOffload:
    """A fraction of the states of an optimizer, in files.

    See [Note: states on disk].

    Args:
        fraction: The fraction of all states, from 0 to 1; whole parameters are taken, the largest first.
        folder: Parent of the private folder; None for the system's temporary folder.
        options: Options of reading and writing.

    Raises:
        ValueError: `fraction` is not in [0, 1].
        OSError: The folder cannot be made.
    """

    def __init__(self, fraction: float, folder: str | Path | None, options: DiskOptions) -> None:
        if not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            raise ValueError(f"nvme_offload_fraction={fraction!r} is out of range; give a number from 0 to 1")
        if not isinstance(options, DiskOptions):
            raise ValueError(f"nvme_options={options!r} must be DiskOptions(...)")
        self._fraction = fraction
        self._parent = folder
        self._options = options
        self._folder = PrivateFolder(folder) if fraction else None
        self._seen: set[Tensor] = set()
        self._blocks_of: dict[Tensor, list[DiskBlock]] = {}  # of the parameters on disk
        self._mapped: dict[Tensor, dict[str, Tensor]] = {}
        self._files: list[StateFile] = []
        self._file_names = map("{:04d}".format, count())
        self._buffers: list[_Buffer] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return DiskOffload, (self._fraction, self._parent, self._options)  # a copy starts without files

    @property
    def is_used(self) -> bool:
        """Whether any states are to be on disk."""
        return self._folder is not None

    @property
    def folder(self) -> Path | None:
        """The private folder."""
        return None if self._folder is None else self._folder.path

    def holds(self, param: Tensor) -> bool:
        """Return whether the states of a parameter are on disk."""
        return param in self._blocks_of

    def num_left(self, param: Tensor, done: Collection[DiskBlock]) -> int:
        """Return how many blocks of a parameter on disk are not done."""
        return sum(block not in done for block in self._blocks_of[param])

    def plan(self, params: Sequence[Tensor]) -> None:
        """Decide which of the parameters that are new have their states on disk, and make the files.

        Raises:
            OSError: The files cannot be made; nothing has changed.
        """
        new = [param for param in params if param not in self._seen] if self.is_used else []
        able = [param for param in new if is_able(param)]
        if new and not able:
            get_dist_logger().log_once(
                "nvme_offload_fraction has no effect on parameters that are on an accelerator or not dense: "
                "only states in the memory of the host go to disk",
                level="warning",
            )
        budget = self._fraction * sum(local(param).numel() for param in able)
        chosen = set()
        for param in sorted(able, key=lambda param: -local(param).numel()):
            if (numel := local(param).numel()) <= budget:
                chosen.add(param)
                budget -= numel
        kinds: dict[tuple[torch.dtype, tuple[str, ...]], list[Tensor]] = {}
        for param in able:
            if param in chosen:
                kinds.setdefault(kind_of(param), []).append(param)
        for (dtype, keys), members in kinds.items():
            self._add_files(members, dtype, keys)
        self._seen.update(new)

    def check(self) -> None:
        """Raise an OSError if a file is smaller than it was."""
        for file in self._files:
            file.check()

    def visit(
        self, states: States, params: Collection[Tensor], *, done: set[DiskBlock]
    ) -> Iterator[list[tuple[DiskPiece, dict[str, Tensor]]]]:
        """Yield pieces of parameters with their states, to be updated in place before the next are yielded.

        States of all parameters that are in memory go to disk meanwhile.

        Args:
            states: The states of the optimizer.
            params: The parameters to be yielded.
            done: Blocks that are not to be yielded; those that were are added.

        Raises:
            OSError: Reading or writing failed. States that could not be written are in memory.
        """
        blocks = self._blocks_to_visit(states, set(params), done)
        if not blocks:
            return
        self.check()
        for file in self._files:
            file.forget_pages()
        walk = _Pass(self._empty_buffers())
        try:
            yield from self._walk(walk, blocks, states, set(params), done)
        except BaseException:
            self._settle(walk, states)
            raise
        self._settle(walk, states)

    def _walk(
        self,
        walk: _Pass,
        blocks: Sequence[DiskBlock],
        states: States,
        params: set[Tensor],
        done: set[DiskBlock],
    ) -> Iterator[list[tuple[DiskPiece, dict[str, Tensor]]]]:
        upcoming = iter(blocks)

        with ThreadPoolExecutor(len(walk.buffers), thread_name_prefix="states") as pool:

            def start_exchange(buffer: _Buffer) -> Future[tuple[_Buffer, DiskBlock | None]]:
                following = next(upcoming, None)
                read = following is not None and any(
                    self._is_mapped(states, piece.param) for piece in following.pieces
                )
                return pool.submit(buffer.exchange, following, read=read)

            running = {start_exchange(buffer) for buffer in walk.buffers}
            while running:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    buffer, block = future.result()
                    if block is None:
                        continue
                    pieces = [(piece, buffer.states_of(piece, block)) for piece in block.pieces]
                    for piece, values in pieces:
                        if not self._is_mapped(states, piece.param):
                            _fill(piece, values, states.get(piece.param, {}))
                    if block not in done:
                        yield [(piece, values) for piece, values in pieces if piece.param in params]
                        done.add(block)
                    buffer.block = block
                    walk.visited.add(block)
                    running.add(start_exchange(buffer))

    def _settle(self, walk: _Pass, states: States) -> None:
        """Mark the states of each visited parameter with their place: on disk, or in memory."""
        unwritten = {buffer.block: buffer for buffer in walk.buffers if buffer.block is not None}
        params = {piece.param for block in walk.visited for piece in block.pieces}
        for param in params:
            blocks = self._blocks_of[param]
            is_written = not unwritten.keys() & set(blocks)
            if is_written and (self._is_mapped(states, param) or walk.visited.issuperset(blocks)):
                states[param].update(self._mapped[param])
            else:
                states[param].update(self._in_memory(param, walk, states, unwritten))

    def _in_memory(
        self, param: Tensor, walk: _Pass, states: States, unwritten: Mapping[DiskBlock, _Buffer]
    ) -> dict[str, Tensor]:
        """Put the states of a parameter together from wherever they are."""
        is_mapped = self._is_mapped(states, param)
        tensors = {key: torch.empty_like(local(tensor)) for key, tensor in self._mapped[param].items()}
        for block in self._blocks_of[param]:
            piece = next(piece for piece in block.pieces if piece.param is param)
            values = {key: flat(tensor)[piece.start : piece.stop] for key, tensor in tensors.items()}
            if block in unwritten:
                for key, source in unwritten[block].states_of(piece, block).items():
                    values[key].copy_(source)
            elif is_mapped or block in walk.visited:
                for key, value in values.items():
                    block.files[key].check()
                    offset = block.offset + piece.offset
                    value.copy_(block.files[key].tensor(offset, value.numel(), block.dtype))
            else:
                _fill(piece, values, states[param])
        return {key: shaped_as(tensor, param) for key, tensor in tensors.items()}

    def _is_mapped(self, states: States, param: Tensor) -> bool:
        state = states.get(param, {})
        return all(state.get(key) is tensor for key, tensor in self._mapped[param].items())

    def _blocks_to_visit(self, states: States, params: set[Tensor], done: set[DiskBlock]) -> list[DiskBlock]:
        in_memory = {
            param
            for param, tensors in self._mapped.items()
            if not self._is_mapped(states, param) and states.get(param, {}).keys() & tensors.keys()
        }
        blocks: dict[DiskBlock, None] = {}
        for param, blocks_of_param in self._blocks_of.items():
            for block in blocks_of_param:
                if param in in_memory or (param in params and block not in done):
                    blocks[block] = None
        return list(blocks)

    def _add_files(self, params: Sequence[Tensor], dtype: torch.dtype, keys: Sequence[str]) -> None:
        assert self._folder is not None
        offsets, size = regions_of(params, dtype)
        name = next(self._file_names)
        files: dict[str, StateFile] = {}
        try:
            for key in keys:
                path = self._folder.path / f"{name}.{key}"
                files[key] = StateFile(path, size, direct=self._options.direct)
        except OSError:
            for file in files.values():
                file.path.unlink()
            raise
        for block in cut_into_blocks(params, offsets, files, dtype, self._options.buffer_size):
            for piece in block.pieces:
                self._blocks_of.setdefault(piece.param, []).append(block)
        for param, offset in zip(params, offsets, strict=True):
            numel = local(param).numel()
            self._mapped[param] = {
                key: shaped_as(file.tensor(offset, numel, dtype), param) for key, file in files.items()
            }
        self._files += files.values()

    def _empty_buffers(self) -> list[_Buffer]:
        if not self._buffers:
            size = self._options.buffer_size
            self._buffers = [
                _Buffer(mmap.mmap(-1, len((*KEYS, MASTER)) * size), size) for _ in range(self._options.depth)
            ]
        for buffer in self._buffers:
            buffer.block = None
        return self._buffers


def _fill(piece: DiskPiece, values: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Take the states of a piece from memory; those that there are not yet begin as they should."""
    held = local(piece.param)
    for key, value in values.items():
        if key in state:
            source = local(state[key])
            if source.stride() != held.stride():
                source = torch.empty_like(held, dtype=source.dtype).copy_(source)
            value.copy_(flat(source)[piece.start : piece.stop])
        elif key == MASTER:
            value.copy_(flat(held.detach())[piece.start : piece.stop])
        else:
            value.zero_()
