"""A store becomes a file or a folder of shards, which the writer writes.

Every rank takes part: tensors travel to the writer block by block (see `_gathering`) and go to disk as they
come. So neither a shard nor a tensor is ever whole in memory, beside what the ranks hold anyway.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from colossalai.checkpoint_io._collective import global_rank, is_writer, on_every_rank
from colossalai.checkpoint_io._hugging_face_index import Index, index_text, plan_shards
from colossalai.checkpoint_io._load_report import listed
from colossalai.checkpoint_io._state import TREE_KEY, Kind, Layout, Store, names_by_tensor
from colossalai.checkpoint_io._streaming import Flow, block_boxes, block_size, flat_bytes, stored_blocks
from colossalai.checkpoint_io.formats._safetensors import in_file_order, write_safetensors
from colossalai.checkpoint_io.formats._sharded_index import INDEX
from colossalai.checkpoint_io.formats._torch_file import write_torch_stream
from colossalai.checkpoint_io.resharding import Box, Entry, Spread, is_tiled, whole_box
from colossalai.checkpoint_io.storage import Write, atomic_file, atomic_folder, staged


def gathered_blocks(tensor: Entry, *, size: int) -> Iterator[torch.Tensor]:
    """Yield the blocks of a tensor on the writer; every other rank sends what the writer does not hold.

    Every rank takes the blocks of the same tensors in the same order, all of them; on other ranks than the
    writer there are none to be seen. In memory are a block, and what was received of it.

    Args:
        tensor: The tensor, `Spread`.
        size: The most bytes of a block.
    """
    assert isinstance(tensor, Spread), "what is gathered is spread"
    whole = whole_box(tensor.shape)
    holders = {whole: tensor.ranks_of[whole]} if whole in tensor.ranks_of else tensor.ranks_of
    for box in block_boxes(tensor.shape, most=max(1, size // tensor.dtype.itemsize)):
        if is_writer():
            yield _received(tensor, box, holders)
        else:
            _send(tensor, box, holders)


def refuse_what_cannot_be_gathered(store: Store, *, only_dense: bool) -> None:
    """Find what would fail on one rank while others wait for it; no communication.

    Args:
        store: What is to be written.
        only_dense: Whether the format has no place for sparse tensors at all.

    Raises:
        ValueError: A part of a tensor is on no rank, or it is sparse and cannot be written.
    """
    for name in names_by_tensor(store.tensors):
        tensor = store.tensors[name]
        if not isinstance(tensor, Spread):
            continue
        whole = whole_box(tensor.shape)
        if whole not in tensor.ranks_of and not is_tiled(tensor.shape, list(tensor.ranks_of)):
            parts = listed(map(str, tensor.ranks_of))
            raise ValueError(
                f"the ranks do not hold all of {name!r}, of shape {tensor.shape}: there is {parts}"
            )
        sparse = [piece.layout for piece in tensor.pieces.values() if piece.layout is not torch.strided]
        if sparse and only_dense:
            raise ValueError(
                f"{name} is {sparse[0]}, safetensors holds dense tensors only: use use_safetensors=False"
            )
        if sparse and 0 not in tensor.ranks_of.get(whole, ()):
            raise ValueError(
                f"{name} is {sparse[0]} and not on rank 0, which writes: only dense tensors can be gathered"
            )


def local_sparse(tensor: Entry) -> torch.Tensor | None:
    """Return the sparse tensor that an entry stands for, if this rank holds it."""
    for piece in tensor.pieces.values() if isinstance(tensor, Spread) else ():
        if piece.layout is not torch.strided:
            return piece
    return None


def _received(tensor: Spread, box: Box, holders: Mapping[Box, tuple[int, ...]]) -> torch.Tensor:
    """Return a block on the writer."""
    for part, ranks in holders.items():
        if 0 in ranks and part.overlap(box) == box:
            return _in_host_memory(box.moved(part.offsets, sign=-1).of(tensor.pieces[part]))
    block = torch.empty(box.sizes, dtype=tensor.dtype)
    for part, ranks in holders.items():
        common = part.overlap(box)
        if common is None:
            continue
        target = common.moved(box.offsets, sign=-1).of(block)
        if 0 in ranks:
            target.copy_(common.moved(part.offsets, sign=-1).of(tensor.pieces[part]))
            continue
        received = target if target.is_contiguous() else torch.empty(common.sizes, dtype=tensor.dtype)
        dist.recv(flat_bytes(received), src=ranks[0])
        if received is not target:
            target.copy_(received)
    return block


def _send(tensor: Spread, box: Box, holders: Mapping[Box, tuple[int, ...]]) -> None:
    for part, ranks in holders.items():
        common = part.overlap(box)
        if common is not None and 0 not in ranks and global_rank() == ranks[0]:
            own = _in_host_memory(common.moved(part.offsets, sign=-1).of(tensor.pieces[part]))
            dist.send(flat_bytes(own), dst=0)


def _in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous()


def save_store(
    path: str | Path, store: Store, kind: Kind, layout: Layout, *, texts: Mapping[str, str] | None = None
) -> None:
    """Write a checkpoint at `path`, as a whole or not at all; collective.

    A folder that exists keeps the files in it that are not of this kind of checkpoint.

    Args:
        path: A file, or a folder if `layout.shard`; a file name that ends with ".safetensors" chooses that
            format.
        store: What to write: tensors that the ranks hold, or tensors in another checkpoint.
        kind: What it is.
        layout: How to lay it out.
        texts: Text files to put beside the shards, by name.
    """
    size = block_size(layout.buffer_size)
    if not layout.shard:
        if layout.variant is not None:
            raise ValueError(
                f"variant={layout.variant!r} is a part of the file names in a folder: give shard=True, or "
                f"put it in the name of the file"
            )
        use_safetensors = layout.use_safetensors or Path(path).suffix == ".safetensors"
        with staged(atomic_file, path, num_bytes=total_bytes(store)) as write:
            _write_file(write, store, kind, use_safetensors=use_safetensors, size=size)
        return
    texts = texts or {}

    def keep(name: str) -> bool:
        is_same = kind.stems.owns(name, variant=layout.variant) or name in texts
        is_in_slices = name == kind.part and (Path(path) / name / INDEX).is_file()  # it would be read instead
        return not is_same and not is_in_slices

    with staged(partial(atomic_folder, keep=keep), path, num_bytes=total_bytes(store)) as write:
        _write_folder(write, store, kind, layout, size=size)
        for name, text in texts.items():
            write(partial(_write_text, name=name, text=text))


def write_torch_store(write: Write, content: Any, stores: Iterable[Store], *, buffer_size: float) -> None:
    """Write plain values with the tensors of some stores in them as one torch file; collective.

    Args:
        write: Writes to the file.
        content: The values; in the place of a tensor is its entry in one of the stores.
        stores: The stores.
        buffer_size: The most memory that this takes on a rank, in MB.
    """
    tensors = []
    for store in stores:
        on_every_rank(partial(refuse_what_cannot_be_gathered, store, only_dense=False))
        tensors += [store.tensors[name] for name in names_by_tensor(store.tensors)]
    _write_torch(write, content, tensors, ".", size=block_size(buffer_size))


def total_bytes(store: Store) -> int:
    """Return the bytes of all full tensors, tied ones counted once."""
    return sum(store.tensors[name].nbytes for name in names_by_tensor(store.tensors))


def _write_file(write: Write, store: Store, kind: Kind, *, use_safetensors: bool, size: int) -> None:
    on_every_rank(partial(refuse_what_cannot_be_gathered, store, only_dense=use_safetensors))
    tensors = {name: store.tensors[name] for name in names_by_tensor(store.tensors)}
    if use_safetensors:
        _write_safetensors(write, tensors, ".", size=size, header={TREE_KEY: json.dumps(store.tree)})
    else:
        _write_torch(write, kind.join(store), tensors.values(), ".", size=size)


def _write_folder(write: Write, store: Store, kind: Kind, layout: Layout, *, size: int) -> None:
    """Write shards and an index into the folder that is being written; collective."""
    on_every_rank(partial(refuse_what_cannot_be_gathered, store, only_dense=layout.use_safetensors))
    groups = names_by_tensor(store.tensors)
    plan = plan_shards(
        {name: store.tensors[name].nbytes for name in groups}, size_per_shard=layout.size_per_shard
    )
    weight_map: dict[str, str] = {}
    for number, first_names in enumerate(plan, start=1):
        file = kind.stems.shard_name(
            number, len(plan), use_safetensors=layout.use_safetensors, variant=layout.variant
        )
        tensors = {name: store.tensors[name] for name in first_names}
        if layout.use_safetensors:
            # No room for a second name of the same tensor: the module that ties them restores it.
            weight_map |= dict.fromkeys(first_names, file)
            _write_safetensors(write, tensors, file, size=size, header={})
        else:
            names = [name for first in first_names for name in groups[first]]
            weight_map |= dict.fromkeys(names, file)
            content = {name: store.tensors[name] for name in names}
            _write_torch(write, content, tensors.values(), file, size=size)
    index = Index(weight_map, {"total_size": total_bytes(store), TREE_KEY: store.tree})
    index_name = kind.stems.index_name(use_safetensors=layout.use_safetensors, variant=layout.variant)
    write(partial(_write_text, name=index_name, text=index_text(index)))


def _write_torch(write: Write, content: Any, tensors: Iterable[Entry], name: str, *, size: int) -> None:
    streamed = [tensor for tensor in tensors if local_sparse(tensor) is None]

    def act(path: Path, flow: Flow) -> None:
        write_torch_stream(path / name, content, streamed, flow=flow, held_locally=local_sparse)

    _stream(write, streamed, act, size=size)


def _write_safetensors(
    write: Write, tensors: Mapping[str, Entry], name: str, *, size: int, header: Mapping[str, str]
) -> None:
    tensors = in_file_order(tensors)

    def act(path: Path, flow: Flow) -> None:
        write_safetensors(path / name, tensors, header=header, flow=flow)

    _stream(write, tensors.values(), act, size=size)


def _stream(
    write: Write, tensors: Iterable[Entry], action: Callable[[Path, Flow], None], *, size: int
) -> None:
    """Have the writer do something with the values of tensors, while the other ranks send them."""
    flow = Flow(tensors, partial(_blocks, size=size))

    def act(path: Path) -> None:
        try:
            action(path, flow)
        finally:
            flow.drain()  # also after an error: the others are sending

    write(act, elsewhere=flow.drain)


def _blocks(tensor: Entry, *, size: int) -> Iterator[torch.Tensor]:
    return (gathered_blocks if isinstance(tensor, Spread) else stored_blocks)(tensor, size=size)


def _write_text(folder: Path, *, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="utf-8")
