"""Writer of whole tensors: a single file, or shards with the index of Hugging Face.

Every rank takes part: tensors are sent to the writer block by block and written on arrival. So neither a
shard nor a tensor is ever whole in additional memory.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from colossalai.checkpoint_io._collective import global_rank, on_every_rank
from colossalai.checkpoint_io._hugging_face_index import HuggingFaceIndex, index_text, plan_shards
from colossalai.checkpoint_io._state import TREE_KEY, FileLayout, Kind
from colossalai.checkpoint_io.formats._safetensors import in_file_order, write_safetensors
from colossalai.checkpoint_io.formats._torch_file import write_torch_stream
from colossalai.checkpoint_io.resharding import (
    FlatStateDict,
    ShardedTensor,
    StoredTensor,
    TensorMetadata,
    with_tensors_named,
)
from colossalai.checkpoint_io.storage import (
    INDEX,
    Json,
    Write,
    atomic_file,
    atomic_folder,
    block_size,
    bytes_of,
    flat_bytes,
    listed,
    staged,
)
from colossalai.tensor import Box, block_boxes, is_tiled, whole_box

State = FlatStateDict[TensorMetadata]


class ByteStream:
    """The bytes of several tensors, one after the other.

    Other ranks send their blocks in any case: so the stream is always received to its end, by `drain` if not
    by use.

    Args:
        tensors: The tensors, in the order of their use.
        size: The most bytes of a block.
    """

    def __init__(self, tensors: Iterable[TensorMetadata], *, size: int) -> None:
        self._blocks = (block for tensor in tensors for block in _blocks(tensor, size))

    def of(self, tensor: TensorMetadata) -> Iterator[memoryview]:
        """Yield the bytes of the next tensor."""
        left = tensor.nbytes
        while left > 0:
            block = bytes_of(next(self._blocks))
            left -= len(block)
            yield block
        assert left == 0, "a block belongs to one tensor"

    def drain(self) -> None:
        """Receive the remaining blocks, and drop them."""
        for _ in self._blocks:
            pass


def _blocks(tensor: TensorMetadata, size: int) -> Iterator[torch.Tensor]:
    """Return the blocks of a tensor, contiguous and in host memory."""
    if isinstance(tensor, StoredTensor):
        return tensor.blocks(size=size)
    assert isinstance(tensor, ShardedTensor)
    return gathered_blocks(tensor, size=size)


def gathered_blocks(tensor: ShardedTensor, *, size: int) -> Iterator[torch.Tensor]:
    """Yield the blocks of a tensor on the writer; every other rank sends the boxes that the writer lacks.

    Messages are point to point, for missing boxes only: every rank iterates over all blocks of the same
    tensors in the same order, so sends and receives match; ranks other than the writer get no blocks. The
    memory is a block, and its received parts.

    Args:
        tensor: The tensor.
        size: The most bytes of a block.
    """
    whole = whole_box(tensor.shape)
    holders = {whole: tensor.ranks_of[whole]} if whole in tensor.ranks_of else tensor.ranks_of
    for box in block_boxes(tensor.shape, most=max(1, size // tensor.dtype.itemsize)):
        if global_rank() == 0:
            yield _received(tensor, box, holders)
        else:
            _send(tensor, box, holders)


def refuse_what_cannot_be_gathered(state: State, *, only_dense: bool) -> None:
    """Refuse states that would fail on one rank while others wait for it; no communication.

    Args:
        state: The state to write.
        only_dense: Whether the format has no place for sparse tensors at all.

    Raises:
        ValueError: A part of a tensor is on no rank, or a tensor is sparse and cannot be written.
    """
    for name in state.names_by_tensor:
        tensor = state.tensors[name]
        if not isinstance(tensor, ShardedTensor):
            continue
        whole = whole_box(tensor.shape)
        if whole not in tensor.ranks_of and not is_tiled(tensor.shape, list(tensor.ranks_of)):
            parts = listed(map(str, tensor.ranks_of))
            raise ValueError(
                f"the ranks do not hold all of {name!r}, of shape {tensor.shape}: there is {parts}"
            )
        sparse = [shard.layout for shard in tensor.shards.values() if shard.layout is not torch.strided]
        if sparse and only_dense:
            raise ValueError(
                f"{name} is {sparse[0]}, safetensors holds dense tensors only: use use_safetensors=False"
            )
        if sparse and 0 not in tensor.ranks_of.get(whole, ()):
            raise ValueError(
                f"{name} is {sparse[0]} and not on rank 0, which writes: only dense tensors can be gathered"
            )


def local_sparse(tensor: TensorMetadata) -> torch.Tensor | None:
    """Return the sparse tensor that metadata stand for, if this rank holds it."""
    for shard in tensor.shards.values() if isinstance(tensor, ShardedTensor) else ():
        if shard.layout is not torch.strided:
            return shard
    return None


def _received(tensor: ShardedTensor, box: Box, holders: Mapping[Box, tuple[int, ...]]) -> torch.Tensor:
    """Return a block on the writer."""
    for part, ranks in holders.items():
        if 0 in ranks and part.overlap(box) == box:
            return _in_host_memory(box.moved(part.offsets, sign=-1).of(tensor.shards[part]))
    block = torch.empty(box.sizes, dtype=tensor.dtype)
    for part, ranks in holders.items():
        common = part.overlap(box)
        if common is None:
            continue
        target = common.moved(box.offsets, sign=-1).of(block)
        if 0 in ranks:
            target.copy_(common.moved(part.offsets, sign=-1).of(tensor.shards[part]))
            continue
        received = target if target.is_contiguous() else torch.empty(common.sizes, dtype=tensor.dtype)
        # The first rank that has it sends it in `_send`, for the same block; the writer waits here.
        dist.recv(flat_bytes(received), src=ranks[0])
        if received is not target:
            target.copy_(received)
    return block


def _send(tensor: ShardedTensor, box: Box, holders: Mapping[Box, tuple[int, ...]]) -> None:
    for part, ranks in holders.items():
        common = part.overlap(box)
        if common is not None and 0 not in ranks and global_rank() == ranks[0]:
            own = _in_host_memory(common.moved(part.offsets, sign=-1).of(tensor.shards[part]))
            # Rank 0 receives parts in the order of `holders`, which is the same on all ranks.
            dist.send(flat_bytes(own), dst=0)


def _in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous()


def save_whole(
    path: str | Path,
    state: State,
    kind: Kind,
    layout: FileLayout,
    *,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write a checkpoint of whole tensors at `path`, as a whole or not at all; collective.

    A folder that exists keeps the files in it that are not of this kind of checkpoint.

    Args:
        path: A file, or a folder if `layout.shard`; a file name that ends with ".safetensors" chooses that
            format.
        state: The state to write: tensors of the ranks, or tensors in another checkpoint.
        kind: Its kind.
        layout: Its layout in files.
        texts: Text files to write with the shards, by name.

    Raises:
        ValueError: `layout` names a variant without shards or too small a buffer, or the format cannot hold a
            tensor.
        OSError: The checkpoint cannot be written; on all ranks.
    """
    size = block_size(layout.buffer_size)
    if not layout.shard:
        if layout.variant is not None:
            raise ValueError(
                f"variant={layout.variant!r} is a part of the file names in a folder: give shard=True, or "
                f"put it in the name of the file"
            )
        use_safetensors = layout.use_safetensors or Path(path).suffix == ".safetensors"
        with staged(atomic_file, path, num_bytes=state.nbytes) as write:
            _write_file(write, state, kind, use_safetensors=use_safetensors, size=size)
        return
    texts = texts or {}

    def keep(name: str) -> bool:
        is_same = kind.stems.owns(name, variant=layout.variant) or name in texts
        is_in_slices = name == kind.part and (Path(path) / name / INDEX).is_file()  # it would be read instead
        return not is_same and not is_in_slices

    with staged(partial(atomic_folder, keep=keep), path, num_bytes=state.nbytes) as write:
        _write_folder(write, state, kind, layout, size=size)
        for name, text in texts.items():
            write(partial(_write_text, name=name, text=text))


def write_torch_states(
    write: Write, content: Mapping[str, object], states: Iterable[State], *, buffer_size: float
) -> None:
    """Write plain values with the tensors of some state dicts in them as one torch file; collective.

    Args:
        write: Writes to the file.
        content: The values; in the place of a tensor are its metadata, as in one of the states.
        states: The states.
        buffer_size: The most memory that this takes on a rank, in MB.

    Raises:
        ValueError: A part of a tensor is on no rank, or a tensor is sparse and cannot be written.
        OSError: The file cannot be written; on all ranks.
    """
    tensors: list[TensorMetadata] = []
    for state in states:
        on_every_rank(partial(refuse_what_cannot_be_gathered, state, only_dense=False))
        tensors += [state.tensors[name] for name in state.names_by_tensor]
    _write_torch(write, content, tensors, ".", size=block_size(buffer_size))


def _write_file(write: Write, state: State, kind: Kind, *, use_safetensors: bool, size: int) -> None:
    on_every_rank(partial(refuse_what_cannot_be_gathered, state, only_dense=use_safetensors))
    tensors = {name: state.tensors[name] for name in state.names_by_tensor}
    if use_safetensors:
        header = {TREE_KEY: json.dumps(_tree_of_first_names(state))}
        _write_safetensors(write, tensors, ".", size=size, header=header)
    else:
        _write_torch(write, kind.join(state), tensors.values(), ".", size=size)


def _write_folder(write: Write, state: State, kind: Kind, layout: FileLayout, *, size: int) -> None:
    """Write shards and an index into the folder that is being written; collective."""
    on_every_rank(partial(refuse_what_cannot_be_gathered, state, only_dense=layout.use_safetensors))
    groups = state.names_by_tensor
    plan = plan_shards(
        {name: state.tensors[name].nbytes for name in groups}, size_per_shard=layout.size_per_shard
    )
    weight_map: dict[str, str] = {}
    for number, first_names in enumerate(plan, start=1):
        file = kind.stems.shard_name(
            number, len(plan), use_safetensors=layout.use_safetensors, variant=layout.variant
        )
        tensors = {name: state.tensors[name] for name in first_names}
        if layout.use_safetensors:
            # No room for a second name of the same tensor: the module that ties them restores it.
            weight_map |= dict.fromkeys(first_names, file)
            _write_safetensors(write, tensors, file, size=size, header={})
        else:
            names = [name for first in first_names for name in groups[first]]
            weight_map |= dict.fromkeys(names, file)
            content = {name: state.tensors[name] for name in names}
            _write_torch(write, content, tensors.values(), file, size=size)
    tree = _tree_of_first_names(state) if layout.use_safetensors else state.tree
    index = HuggingFaceIndex(weight_map, {"total_size": state.nbytes, TREE_KEY: tree})
    index_name = kind.stems.index_name(use_safetensors=layout.use_safetensors, variant=layout.variant)
    write(partial(_write_text, name=index_name, text=index_text(index)))


def _tree_of_first_names(state: State) -> Json:
    """Return the tree of a state in which tied tensors have the name that safetensors stores them under."""
    groups = state.names_by_tensor
    firsts = {name: first for first, names in groups.items() for name in names}
    return with_tensors_named(state.tree, firsts)


def _write_torch(
    write: Write, content: Mapping[str, object], tensors: Iterable[TensorMetadata], name: str, *, size: int
) -> None:
    streamed = [tensor for tensor in tensors if local_sparse(tensor) is None]

    def act(path: Path, stream: ByteStream) -> None:
        write_torch_stream(path / name, content, streamed, blocks_of=stream.of, held_locally=local_sparse)

    _stream(write, streamed, act, size=size)


def _write_safetensors(
    write: Write, tensors: Mapping[str, TensorMetadata], name: str, *, size: int, header: Mapping[str, str]
) -> None:
    tensors = in_file_order(tensors)

    def act(path: Path, stream: ByteStream) -> None:
        write_safetensors(path / name, tensors, header=header, blocks_of=stream.of)

    _stream(write, tensors.values(), act, size=size)


def _stream(
    write: Write,
    tensors: Iterable[TensorMetadata],
    action: Callable[[Path, ByteStream], None],
    *,
    size: int,
) -> None:
    """Have the writer do something with the values of tensors, while the other ranks send them."""
    stream = ByteStream(tensors, size=size)

    def act(path: Path) -> None:
        try:
            action(path, stream)
        finally:
            stream.drain()  # also after an error: the others are sending, and would wait for ever

    write(act, elsewhere=stream.drain)


def _write_text(folder: Path, *, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="utf-8")
